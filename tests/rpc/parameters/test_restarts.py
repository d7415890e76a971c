"""Parameters of a server with a state directory, which is started again."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.rpc.parameters.requests import MOMENTUM, Get, Read, Rounds, create, push, ref, spec
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

Run = Callable[[], AbstractContextManager[RawCalls]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    @contextmanager
    def running() -> Iterator[RawCalls]:
        config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(tmp_path)))
        with LocalServer(config) as local, RawCalls(local.address) as calls:
            yield calls

    return running


@pytest.mark.parametrize(
    ("durability", "num_left"),
    [(accumulator_pb2.DURABILITY_ROUND, 0), (accumulator_pb2.DURABILITY_GRADIENT, 1)],
    ids=["round", "gradient"],
)
def test_versions_rules_and_calls_survive(run: Run, durability: accumulator_pb2.Durability, num_left: int) -> None:
    two = parameters_pb2.RoundRules(num_required=2)
    asked = create(spec=spec(optimizer=MOMENTUM, rounds=two, durability=durability))
    read = Read(parameters=ref(), with_state=True)
    with run() as raw:
        raw.call("CreateParameters", asked)
        for sequence in (1, 2, 3):
            raw.call("Push", push(sequence=sequence, local_step=(sequence - 1) // 2, worker_id=f"worker {sequence}"))
        before = raw.call("GetParameters", Get(parameters=ref())).info
        version, records = raw.call("ReadParameters", read), raw.call("ListRounds", Rounds(parameters=ref()))
    with run() as raw:
        found = raw.call("CreateParameters", asked)
        assert not found.created
        assert (found.info.step, found.info.digest, found.info.num_updates) == (1, before.digest, num_left)
        assert found.info.spec == before.spec
        assert raw.call("ReadParameters", read) == version
        assert raw.call("ListRounds", Rounds(parameters=ref())) == records
        assert raw.call("Push", push(sequence=2, worker_id="worker 2")).duplicate
        again = push(sequence=3, local_step=1, worker_id="worker 3", accepted_before=True)
        assert raw.call("Push", again).duplicate is bool(num_left)
        raw.call("Push", push(sequence=4, local_step=1, worker_id="worker 4"))
        assert raw.call("GetParameters", Get(parameters=ref())).info.step == 2
