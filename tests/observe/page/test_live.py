"""The status page of a real server with 1,000 accumulators, one of which has 500 workers."""

from collections.abc import Iterator

import numpy as np
import pytest
from playwright.async_api import expect

import gradserve
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.observe.http_client import url_of
from tests.observe.page.open_page import OpenPage
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_ACCUMULATORS = 1000
NUM_WORKERS = 500


@pytest.fixture(scope="module")
def busy() -> Iterator[LocalServer]:
    """Of 500 workers, the last one is missing in the second round; the one before is still expected in the third."""
    workers = [f"worker-{number:03}" for number in range(NUM_WORKERS)]
    gradient = np.ones(4, np.float32)
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local, gradserve.connect(local.address) as client:
        for number in range(NUM_ACCUMULATORS - 1):
            client.conditional_accumulator("float32", (4,), shared_name=f"idle-{number:03}")
        net = client.conditional_accumulator("float32", (4,), shared_name="net")
        for step, present in enumerate([workers, workers[:-1], workers[:-2]]):
            for worker in present:
                net.apply_grad(gradient, local_step=step, worker_id=worker)
            if step < 2:
                net.take_grad(len(present), timeout=PATIENCE_SECONDS)
        with pytest.raises(gradserve.InvalidArgumentError):
            net.apply_grad(np.ones(3, np.float32), local_step=2)
        yield local


async def test_everything_of_a_busy_server_is_shown(opened: OpenPage, busy: LocalServer) -> None:
    page = await opened.at(
        url_of(busy) + "#container=default&name=net&order=bytes", shown=f"text={NUM_WORKERS} workers"
    )
    await expect(page.locator("#list-count")).to_have_text("50 of 1,000")
    await expect(page.locator("#facts")).to_contain_text("Open round498")
    await expect(page.locator("#accumulators tbody tr")).to_have_count(50)
    await page.locator("#worker-filter").fill("worker-49")
    await expect(page.locator("#timeline .lane-label")).to_have_count(1 + 10)
    marks = {kind: await page.locator(f"#timeline .{kind}").count() for kind in ("missing", "expected")}
    assert marks == {"missing": 1, "expected": 1}
    await expect(page.locator("#errors tbody tr").first).to_contain_text("INVALID_ARGUMENT")
    await expect(page.locator("#methods tbody")).to_contain_text("CreateAccumulator")
    assert await page.evaluate("document.querySelectorAll('*').length") < 4000
    await page.locator("#filter").fill("IDLE-99")
    await expect(page.locator("#list-count")).to_have_text("9")
