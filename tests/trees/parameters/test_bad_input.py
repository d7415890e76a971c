"""Bad requests fail at an aggregator as they fail at its server, and change nothing."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.bad_input.parameter_tables import BAD_PARAMETERS, PARAMETER_CALLS
from tests.bad_input.requests import Bad
from tests.rpc.parameters.requests import Get, List
from tests.servers.raw_calls import RawCalls
from tests.trees.servers import running_tree


@pytest.fixture(scope="module")
def calls() -> Iterator[tuple[RawCalls, RawCalls]]:
    """Calls at the server, and at the aggregator, through which the parameters were made."""
    with ExitStack() as stack:
        top, near = stack.enter_context(running_tree(1))
        there, here = [stack.enter_context(RawCalls(each.address)) for each in (top, near)]
        for method, request in PARAMETER_CALLS:
            here.call(method, request)
        yield there, here


@pytest.mark.parametrize(
    "bad", [pytest.param(bad, id=f"{number}-{bad.method}") for number, bad in enumerate(BAD_PARAMETERS)]
)
def test_bad_requests(calls: tuple[RawCalls, RawCalls], bad: Bad) -> None:
    there, here = calls

    def state() -> Any:
        return there.call("ListParameters", List()), there.call("GetParameters", Get(parameters={"name": "net"}))

    before = state()
    bad.check(here.fail(bad.method, bad.request))
    assert state() == before
