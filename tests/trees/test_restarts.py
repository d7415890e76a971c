"""Every gradient counts once, whichever server is killed, and whenever."""

import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.testing import ServerProcess
from tests.cluster.servers import addresses_of, running_cluster
from tests.servers.connecting import no_server
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.trees.servers import aggregator, aggregator_process
from tests.trees.workers import at_once, clients_of

GRADIENTS = [{name: np.full(3, value, np.float32) for name in "wb"} for value in (1.0, 2.0, 6.0)]
MEAN = 3.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a process may take long to start."""
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))


@contextmanager
def _tree(
    folder: Path, num_servers: int = 1, *flags: str
) -> Iterator[tuple[gradserve.GradientAccumulator, ServerProcess, list[gradserve.GradientAccumulator]]]:
    """Runs servers, an aggregator in a process, and two workers; yields the accumulator as the others see it.

    With several servers, it is sharded.
    """
    how: dict[str, Any] = {"shared_name": "net", "sharded": num_servers > 1 or None}
    with (
        running_cluster(num_servers) as top,
        gradserve.connect(addresses_of(top)) as client,
        aggregator_process(folder, ",".join(addresses_of(top)), *flags) as near,
        clients_of(near.address, 2) as clients,
    ):
        at_top = client.gradient_accumulator(GRADIENTS[0], **how)
        yield at_top, near, [each.gradient_accumulator(GRADIENTS[0], **how) for each in clients]


def _wait_for(accumulator: gradserve.GradientAccumulator, count: int) -> None:
    eventually(accumulator.num_accumulated, lambda seen: seen >= count)


def _check(futures: list[Future[gradserve.PushPullResult]]) -> None:
    for each in futures:
        result = each.result()
        assert (result.num_gradients, result.step, result["w"][0], result["b"][2]) == (3, 1, MEAN, MEAN)
        assert result.outcome is gradserve.ACCEPTED


def _num_that_came(near: ServerProcess) -> int:
    """Returns how many gradients an aggregator with an HTTP port has got."""
    with (
        gradserve.connect(near.address) as client,
        urllib.request.urlopen(client.server_info().http_url + "metrics") as page,
    ):
        found = re.search(r"^gradserve_upstream_gradients_total (\d+)", page.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_an_aggregator_dies_before_it_passes_a_gradient_on(tmp_path: Path) -> None:
    with _tree(tmp_path, 1, "--http-listen", "127.0.0.1:0") as (at_top, near, made), ThreadPoolExecutor(2) as threads:
        first = threads.submit(made[0].push_pull, GRADIENTS[0], 3, 0)
        eventually(lambda: _num_that_came(near) == 1)
        assert at_top.num_accumulated() == 0
        near.restart()
        second = threads.submit(made[1].push_pull, GRADIENTS[1], 3, 0)
        _wait_for(at_top, 2)
        at_top.push_pull(GRADIENTS[2], 3, 0)
        _check([first, second])


@pytest.mark.parametrize("num_servers", [1, 2], ids=["whole", "sharded"])
def test_an_aggregator_dies_after_it_has_passed_gradients_on(tmp_path: Path, num_servers: int) -> None:
    with _tree(tmp_path, num_servers) as (at_top, near, made), ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(acc.push_pull, each, 3, 0) for acc, each in zip(made, GRADIENTS, strict=False)]
        _wait_for(at_top, 2)
        near.restart()
        # Both have come again when they wait at the server again.
        eventually(lambda: at_top.info().num_waiting, lambda seen: seen == 2)
        assert not any(each.done() for each in pulls)
        assert at_top.num_accumulated() == 2
        at_top.push_pull(GRADIENTS[2], 3, 0)
        _check(pulls)
        assert at_top.info().global_step == 1


def test_an_aggregator_that_is_stopped_ends_at_once(tmp_path: Path) -> None:
    """Calls that wait upstream do not hold it up; they come again when it is back."""
    with _tree(tmp_path) as (at_top, near, made), ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(acc.push_pull, each, 3, 0) for acc, each in zip(made, GRADIENTS, strict=False)]
        _wait_for(at_top, 2)
        near.signal(signal.SIGTERM)
        assert near.wait(PATIENCE_SECONDS) == 0
        near.restart()
        at_top.push_pull(GRADIENTS[2], 3, 0)
        _check(pulls)


def test_an_aggregator_dies_after_the_answer(tmp_path: Path) -> None:
    """As if the answers had been lost."""
    with _tree(tmp_path) as (at_top, near, made):
        with ThreadPoolExecutor(3) as threads:
            numbers = [1_000_001, 1_000_002]
            pull = lambda at: made[at].push_pull(GRADIENTS[at], 3, 0, worker_id=f"w{at}", request_id=numbers[at])  # noqa: E731
            first = [threads.submit(pull, at) for at in range(2)]
            _wait_for(at_top, 2)
            at_top.push_pull(GRADIENTS[2], 3, 0)
            _check(first)
            near.restart()
            again = [threads.submit(pull, at) for at in range(2)]
            assert all(each.result().duplicate for each in again)
            _check(again)
        assert (at_top.info().global_step, at_top.num_accumulated()) == (1, 0)


def test_gradients_that_were_applied_count_once_after_a_restart(tmp_path: Path) -> None:
    with _tree(tmp_path) as (at_top, near, made):
        apply = lambda at: made[at].apply_grad(GRADIENTS[at], 0, worker_id=f"w{at}", request_id=1_000_000 + at)  # noqa: E731
        assert not any(each.duplicate for each in at_once(apply, range(2)))
        near.restart()
        assert all(each.duplicate for each in at_once(apply, range(2)))
        assert at_top.num_accumulated() == 2


def test_a_take_whose_answer_was_lost_takes_the_same_round(tmp_path: Path) -> None:
    with _tree(tmp_path) as (at_top, near, made):
        at_once(lambda acc, gradient: acc.apply_grad(gradient), made, GRADIENTS[:2])
        taken = made[0].take_grad(2, request_id=7_000_000)
        near.restart()
        again = made[0].take_grad(2, request_id=7_000_000)
        assert (again.step, again["w"][0]) == (taken.step, taken["w"][0]) == (1, 1.5)
        assert at_top.info().global_step == 1


@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_the_server_upstream_is_killed(tmp_path: Path, durability: str) -> None:
    """Gradients that it had acknowledged are there, or are sent again by the workers, which keep them."""
    flags = ("--state-dir", str(tmp_path / "state"), "--durability", durability, "--warm-up", "false")
    with (
        ServerProcess(tmp_path, *flags) as top,
        aggregator(top.address, 2, 1.0) as near,
        clients_of(near.address, 2) as clients,
    ):
        made = [each.gradient_accumulator(GRADIENTS[0], "net") for each in clients]
        at_once(lambda acc, gradient: acc.apply_grad(gradient), made, GRADIENTS[:2])
        top.restart()
        # Each worker learns of the restart by its next call.
        at_once(lambda acc: acc.num_accumulated(), made)
        average = made[0].take_grad(2)
        assert (average.num_gradients, average["w"][0], average.step) == (2, 1.5, 1)
        at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 1), made, GRADIENTS[:2])


def test_the_server_upstream_is_killed_without_a_state_directory(tmp_path: Path) -> None:
    """The workers are told what is lost, as without an aggregator."""
    with (
        ServerProcess(tmp_path, "--warm-up", "false") as top,
        aggregator(top.address, 2, 1.0) as near,
        clients_of(near.address, 2) as clients,
    ):
        made = [each.gradient_accumulator(GRADIENTS[0], "net") for each in clients]
        at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 0), made, GRADIENTS[:2])
        top.restart()
        for acc in made:
            with pytest.raises(gradserve.LostError, match="has lost accumulator"):
                acc.num_accumulated()
        results = at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 0), made, GRADIENTS[:2])
        assert [each.step for each in results] == [1, 1]


def test_the_server_upstream_is_not_there(tmp_path: Path) -> None:
    with (
        no_server() as address,
        aggregator(address, 2) as near,
        gradserve.connect(near.address) as client,
        gradserve.connect(near.address, timeout=1) as impatient,
    ):
        assert client.server_info().version == gradserve.__version__
        with pytest.raises(
            (gradserve.UnavailableError, gradserve.DeadlineExceededError), match="the server upstream|1 s|time limit"
        ):
            impatient.gradient_accumulator(GRADIENTS[0], "net")
