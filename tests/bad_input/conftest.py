"""A server whose state every bad request must leave as it was."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.bad_input.layer_tables import LAYER_CALLS
from tests.bad_input.parameter_tables import PARAMETER_CALLS
from tests.bad_input.requests import BEGIN, OK, SPECS, USED, Apply, Create, Take, dense, ref, state, usage, usage_in
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """A server of this file alone, as its use is compared."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local:
        yield local


@pytest.fixture(scope="module")
def server_address(server: LocalServer) -> str:
    return server.address


@pytest.fixture(scope="module")
def raw(server_address: str) -> Iterator[RawCalls]:
    with RawCalls(server_address) as calls:
        for name, each in SPECS.items():
            calls.call("CreateAccumulator", Create(accumulator=ref(name), spec=each))
        for name, part in BEGIN.items():
            calls.call("ApplyGradient", Apply(accumulator=ref(name), gradient=[part], worker_id="first"))
        calls.call("ApplyGradient", Apply(accumulator=ref("stepped"), gradient=[dense(OK)]))
        calls.call("TakeGradient", Take(accumulator=ref("stepped"), num_required=1))
        calls.call("SetGlobalStep", messages_pb2.SetGlobalStepRequest(accumulator=ref("stepped"), global_step=5))
        calls.call("ApplyGradient", USED)
        for method, request in (*LAYER_CALLS, *PARAMETER_CALLS):
            calls.call(method, request)
        yield calls


@dataclass
class LastState:
    """The state in which the last test left the server, and in which the next one finds it."""

    seen: tuple[Any, ...]
    since: list[str] = field(default_factory=list)
    """The tests since all of it was compared."""


_TESTS_BETWEEN = 16


@pytest.fixture(scope="module")
def last_state(raw: RawCalls) -> Iterator[LastState]:
    last = LastState(state(raw))
    yield last
    _compare(raw, last)


@pytest.fixture
def unchanged(request: pytest.FixtureRequest, raw: RawCalls, last_state: LastState) -> Iterator[None]:
    """Checks that a test leaves the server's use as it was, and the server able to answer.

    Everything else that can be seen takes four more calls, so some tests share that.
    """
    yield
    last_state.since.append(request.node.name)
    if len(last_state.since) == _TESTS_BETWEEN or usage(raw) != usage_in(last_state.seen):
        _compare(raw, last_state)


def _compare(raw: RawCalls, last: LastState) -> None:
    """Checks that everything is as it was, and names the tests that may have changed it."""
    tests, last.since = last.since, []
    try:
        # An upload that was broken off gives its memory back when the server notices.
        eventually(lambda: state(raw), last.seen.__eq__)
    except AssertionError as error:
        last.seen = state(raw)
        raise AssertionError(f"one of these has changed it: {', '.join(tests)}") from error
