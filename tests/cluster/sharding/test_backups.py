"""One server of a cluster that was put back to an earlier state, beside others that were not."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve_server.config.servers import ClusterConfig
from tests.cluster.servers import name_at
from tests.cluster.sharding.clients import small_pieces
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.restarting import RestartingServer
from tests.storage.copies import copy_state

HOME, OTHER = 0, 1
BEFORE, AFTER = 2, 5
"""The rounds until the backup, and until the servers end."""


def run(folder: Path, act: Callable[[gradserve.GradientAccumulator], None]) -> None:
    """Runs two durable servers, and does something with an accumulator that is sharded over them."""
    with small_pieces(), ExitStack() as stack:
        places = [ClusterConfig(cluster="train", cluster_size=2, cluster_index=index) for index in range(2)]
        servers = [stack.enter_context(RestartingServer(folder / str(each.cluster_index), each)) for each in places]
        client = stack.enter_context(gradserve.connect([each.address for each in servers], timeout=PATIENCE_SECONDS))
        act(client.gradient_accumulator(gradient(0), name_at(HOME, 2), sharded=True, keep_averages=2))


def gradient(value: float) -> dict[str, np.ndarray]:
    return {"v": np.full(8, value, np.float32), "w": np.full(8, value, np.float32)}


def check(average: gradserve.Average, value: float) -> None:
    assert {name: set(array.tolist()) for name, array in average.items()} == {"v": {value}, "w": {value}}


def train(first: int, last: int, base: float = 0) -> Callable[[gradserve.GradientAccumulator], None]:
    def rounds(acc: gradserve.GradientAccumulator) -> None:
        for step in range(first, last):
            check(acc.push_pull(gradient(base + step), 1, step), base + step)

    return rounds


@pytest.fixture
def restored(tmp_path: Path) -> Callable[[int], Path]:
    """Puts one of two servers back to where both were some rounds before."""
    (tmp_path / "now").mkdir()
    run(tmp_path / "now", train(0, BEFORE))
    copy_state(tmp_path / "now", tmp_path / "before")
    run(tmp_path / "now", train(BEFORE, AFTER))

    def restore(index: int) -> Path:
        shutil.rmtree(tmp_path / "now" / str(index))
        copy_state(tmp_path / "before" / str(index), tmp_path / "now" / str(index))
        return tmp_path / "now"

    return restore


def test_an_earlier_home_goes_on_from_its_step_with_what_is_sent_to_it(restored: Callable[[int], Path]) -> None:
    """The rounds since then never were, for it; what other servers have of them is in no average."""

    def act(acc: gradserve.GradientAccumulator) -> None:
        assert (acc.info().global_step, acc.info().kept_steps) == (BEFORE, (BEFORE - 1, BEFORE))
        for step in (BEFORE - 1, BEFORE):
            check(acc.read_average(step), step - 1)
        train(BEFORE, AFTER + 2, base=100)(acc)
        check(acc.read_average(AFTER + 1), 100 + AFTER)

    run(restored(HOME), act)


def test_what_an_earlier_server_lacks_of_a_round_is_named_and_the_next_round_goes_on(
    restored: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradserve.calls.accumulators.sharding.wire.PATIENCE_SECONDS", 0.05)

    def act(acc: gradserve.GradientAccumulator) -> None:
        assert acc.info().global_step == AFTER
        for step in (AFTER - 1, AFTER):
            with pytest.raises(gradserve.AbortedError, match="server 1 of the cluster has lost gradients of round"):
                acc.read_average(step)
        train(AFTER, AFTER + 2)(acc)

    run(restored(OTHER), act)
