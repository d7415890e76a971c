"""Workers that are killed at each stage of a round, on every way: it stays exact, and nothing of them is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest

import gradserve
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.accumulators.doomed_worker import COMPONENT, SIZE, STAGES, Round, Way, accumulator, work_until_killed
from tests.accumulators.forks import FORKS
from tests.servers.held import Held, held_by
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import end_process
from tests.servers.runtime import NOT_WARMED_UP


@dataclass(frozen=True)
class Crew:
    """A server, and a worker that survives."""

    local: LocalServer
    survivor: gradserve.Client
    way: Way

    def accumulator(self, name: str) -> gradserve.GradientAccumulator:
        return accumulator(self.survivor, name)

    def held(self) -> Held:
        """Returns what the server holds; both sides of the survivor's connection forget regions with a call."""
        self.survivor.server_info()
        return held_by(self.local)

    @contextmanager
    def doomed(self, stage: str, name: str, handle: str) -> Iterator[None]:
        """Has a worker at a stage of the round for the block, at the end of which it is killed."""
        here, there = FORKS.Pipe(duplex=False)
        round_ = Round(self.local.address, self.way, name, handle, there)
        worker = FORKS.Process(target=work_until_killed, args=(stage, round_))
        worker.start()
        there.close()
        try:
            assert here.poll(PATIENCE_SECONDS), "the worker never came there"
            if here.recv() == "almost there":
                eventually(lambda: held_by(self.local).waiters, (1).__eq__)
            yield
        finally:
            end_process(worker)
            here.close()


@pytest.fixture(scope="module", params=get_args(Way))
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local,
        gradserve.connect(local.address, transport=request.param, timeout=PATIENCE_SECONDS) as survivor,
    ):
        crew = Crew(local, survivor, request.param)
        # Whatever a first round and a first end of a worker leave in the process is there from now on.
        with crew.doomed("applied", "first", ""):
            finish_round(crew.accumulator("first"), 1)
        crew.accumulator("first").delete()
        yield crew


def finish_round(acc: gradserve.GradientAccumulator, num_accumulated: int) -> None:
    """Adds gradients so that the average is 2 if the doomed worker's counts as often as it should."""
    for value in (0,) if num_accumulated else (1, 3):
        acc.apply_grad({COMPONENT: np.full(SIZE, value, np.float32)}, local_step=1 << 40)
    np.testing.assert_array_equal(acc.take_grad(2)[COMPONENT], np.full(SIZE, 2, np.float32))
    assert acc.num_accumulated() == 0


COUNTED = {"applied", "waiting_for_all"}
"""The stages in which the gradient has counted."""


@pytest.mark.parametrize("stage", STAGES)
def test_the_round_stays_exact_and_nothing_is_left(crew: Crew, name: str, stage: str) -> None:
    before = crew.held()
    acc = crew.accumulator(name)
    handle = crew.survivor.put(np.zeros(SIZE, np.float32))
    with crew.doomed(stage, name, handle.handle):
        assert acc.num_accumulated() == (stage in COUNTED)
    eventually(lambda: held_by(crew.local).waiters, (0).__eq__)
    finish_round(acc, acc.num_accumulated())
    acc.delete()
    crew.survivor.delete(handle)
    eventually(crew.held, lambda held: held.is_no_more_than(before))
