"""The chain around every call, without a socket: its order, the responses of streams, and the time that is left."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.errors import NotFoundError
from gradserve_server.rpc.boundary.chain import Call, Handle, StreamedCall, chained
from tests.servers.raw_calls import METHODS

UNARY, STREAM = METHODS["GetServerInfo"], METHODS["GetTensors"]


CALL = Call(UNARY.full_name)


class Noting:
    """Writes down when it is put around a method, and when a call passes it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name = name
        self._notes = notes

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        self._notes.append(f"{self._name} around {method.name}")

        async def noted(request: Any, call: Call) -> Any:
            self._notes.append(f"{self._name} before")
            try:
                return await handle(request, call)
            finally:
                self._notes.append(f"{self._name} after")

        return noted


async def test_the_first_interceptor_is_the_outermost_and_is_put_there_once() -> None:
    notes: list[str] = []

    async def answer(request: str, call: Call) -> str:
        notes.append(f"{request} to {call.method}")
        return "response"

    handle = chained((Noting("outer", notes), Noting("inner", notes)), UNARY, answer)
    assert sorted(notes) == ["inner around GetServerInfo", "outer around GetServerInfo"]
    for _ in range(2):
        notes.clear()
        assert await handle("request", CALL) == "response"
        request = f"request to {UNARY.full_name}"
        assert notes == ["outer before", "inner before", request, "inner after", "outer after"]


async def test_responses_of_a_stream_are_sent_within_the_chain() -> None:
    notes: list[str] = []

    async def answer(request: str, call: Call) -> AsyncIterator[str]:
        for number in range(2):
            yield f"{request} {number}"

    async def send(response: str) -> None:
        notes.append(response)

    handle = chained((Noting("outer", notes),), STREAM, answer)
    notes.clear()
    assert await handle("response", StreamedCall(STREAM.full_name, send=send)) is None
    assert notes == ["outer before", "response 0", "response 1", "outer after"]


async def test_a_stream_that_cannot_be_sent_is_closed_at_once() -> None:
    notes: list[str] = []

    async def answer(request: str, call: Call) -> AsyncIterator[str]:
        try:
            yield "response"
        finally:
            notes.append("closed")

    async def send(response: str) -> None:
        raise NotFoundError("nobody")

    handle = chained((Noting("outer", notes),), STREAM, answer)
    notes.clear()
    with pytest.raises(NotFoundError):
        await handle("request", StreamedCall(STREAM.full_name, send=send))
    assert notes == ["outer before", "closed", "outer after"]


def test_the_time_that_is_left_gets_less() -> None:
    call = Call("some.Method", time.monotonic() + 60)
    before, after = call.time_left(), call.time_left()
    assert before is not None
    assert after is not None
    assert 0 < after <= before <= 60


def test_no_time_is_left_after_the_deadline() -> None:
    assert Call("some.Method", time.monotonic() - 1).time_left() == 0


def test_without_a_deadline_a_client_waits_for_ever() -> None:
    assert Call("some.Method").time_left() is None
