"""Servers of a cluster that are killed and started again."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve.testing import ServerProcess
from tests.cluster.servers import name_at
from tests.servers.polling import PATIENCE_SECONDS

GRADIENT = {"w": np.arange(3, dtype=np.float32)}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ServerProcess]:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    return [_server(tmp_path / str(index), index) for index in range(2)]


def _server(folder: Path, index: int, *, size: int = 2, state: Path | None = None) -> ServerProcess:
    folder.mkdir(exist_ok=True)
    place = ("--cluster", "train", "--cluster-index", str(index), "--cluster-size", str(size))
    return ServerProcess(folder, *place, "--state-dir", str(state or folder / "state"), "--warm-up", "false")


@pytest.mark.parametrize("killed", [0, 1])
def test_nothing_acknowledged_is_lost(servers: list[ServerProcess], killed: int) -> None:
    """A gradient of a round that has not ended is sent again; the other server never notices."""
    with ExitStack() as stack:
        for each in servers:
            stack.enter_context(each)
        client = stack.enter_context(gradserve.connect([each.address for each in servers], timeout=PATIENCE_SECONDS))
        nets = [client.gradient_accumulator(GRADIENT, name_at(home, 2), durability="round") for home in range(2)]
        for net in nets:
            net.push_pull(GRADIENT, 1, 0)
            net.apply_grad(GRADIENT, 1, worker_id="a")
        threads = stack.enter_context(ThreadPoolExecutor(2))
        takes = [threads.submit(net.take_grad, 2) for net in nets]
        servers[killed].kill()
        nets[1 - killed].apply_grad(GRADIENT, 1, worker_id="b")
        np.testing.assert_array_equal(takes[1 - killed].result()["w"], GRADIENT["w"])
        servers[killed].restart()
        nets[killed].apply_grad(GRADIENT, 1, worker_id="b")
        np.testing.assert_array_equal(takes[killed].result()["w"], GRADIENT["w"])
        assert [net.info().global_step for net in nets] == [2, 2]


def test_the_state_of_another_server_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with _server(tmp_path / "0", 0, state=state) as first, gradserve.connect(first.address) as client:
        client.gradient_accumulator(GRADIENT, name_at(0, 2), durability="round")
    stranger = _server(tmp_path / "1", 1, state=state)
    with pytest.raises(RuntimeError, match="belongs to server 0 of cluster 'train', and this is server 1 of 2") as end:
        stranger.__enter__()
    assert "the directory is whole: start each server on its own directory" in str(end.value)
    assert "repair" not in str(end.value)
