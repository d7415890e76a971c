"""Interceptors see every call and attempt of a client, add metadata to it, repeat it, or end it."""

import asyncio
import contextvars
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.testing import Faults
from gradserve.transport.settings import TransportName
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS, all_entries, serving
from tests.servers.connecting import no_server
from tests.servers.polling import eventually
from tests.servers.runtime import NOT_WARMED_UP

PUSH_PULL = "gradserve.v1.AccumulatorService/PushPull"
APPLY = "gradserve.v1.AccumulatorService/ApplyGradient"
over_every_way = pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])
ZEROS = {"w": np.zeros(3, np.float32)}


class Arrived:
    """The calls that a server has got: their methods, and their metadata.

    An interceptor of the server.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, str]]] = []

    def around(self, method: Any, handle: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        def noted(request: Any, call: Any) -> Awaitable[Any]:
            self.calls.append((method.name, dict(call.origin().metadata)))
            return handle(request, call)

        return noted

    def of(self, method: str) -> list[dict[str, str]]:
        return [metadata for name, metadata in self.calls if name == method]


class Seen(gradserve.Interceptor):
    """Notes what it sees, and adds a request id."""

    def __init__(self, name: str = "", notes: list[str] | None = None) -> None:
        self.calls: list[tuple[gradserve.CallInfo, gradserve.CallAnswer | Exception]] = []
        self.attempts: list[tuple[gradserve.CallInfo, gradserve.CallAnswer | Exception]] = []
        self.notes = [] if notes is None else notes
        self._name = name

    def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
        self.notes.append(f"{self._name} before")
        try:
            answer = yield {"x-request-id": "run-7"}
        except gradserve.GradserveError as error:
            self.calls.append((call, error))
            raise
        else:
            self.calls.append((call, answer))
        finally:
            self.notes.append(f"{self._name} after")

    def around_attempt(self, call: gradserve.CallInfo) -> gradserve.Around:
        try:
            answer = yield None
        except gradserve.GradserveError as error:
            self.attempts.append((call, error))
            raise
        self.attempts.append((call, answer))

    def of(self, method: str) -> list[tuple[gradserve.CallInfo, Any]]:
        return [(call, outcome) for call, outcome in self.calls if call.method == method]


@pytest.fixture(scope="module")
def faults() -> Faults:
    return Faults()


@pytest.fixture(scope="module")
def arrived() -> Arrived:
    return Arrived()


@pytest.fixture(scope="module")
def address(faults: Faults, arrived: Arrived) -> Iterator[str]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP), Parts(interceptors=(arrived, faults))) as local:
        yield local.address


@pytest.fixture(autouse=True)
def _without_faults(faults: Faults, arrived: Arrived) -> Iterator[None]:
    arrived.calls.clear()
    yield
    faults.clear()


def push(address: str, name: str, interceptors: Sequence[gradserve.Interceptor], way: TransportName) -> None:
    with gradserve.connect(address, transport=way, interceptors=interceptors) as client:
        net = client.gradient_accumulator(ZEROS, shared_name=name, container="team")
        net.push_pull({"w": np.ones(3, np.float32)}, 1, 0, worker_id="a")


def push_with_asyncio(
    address: str, name: str, interceptors: Sequence[gradserve.Interceptor], way: TransportName
) -> None:
    async def run() -> None:
        async with gradserve.aio.connect(address, transport=way, interceptors=interceptors) as client:
            net = await client.gradient_accumulator(ZEROS, shared_name=name, container="team")
            await net.push_pull({"w": np.ones(3, np.float32)}, 1, 0, worker_id="a")

    asyncio.run(run())


both_faces = pytest.mark.parametrize("face", [push, push_with_asyncio], ids=["blocking", "asyncio"])


@over_every_way
@both_faces
def test_a_call_as_it_is_seen(address: str, arrived: Arrived, name: str, face: Any, way: TransportName) -> None:
    seen = Seen()
    face(address, name, [seen], way)
    ((call, answer),) = seen.of(PUSH_PULL)
    assert (call.name, call.container, call.server, call.num_bytes) == (name, "team", 0, 12)
    assert call.attributes["worker_id"] == "a"
    assert call.attributes["num_required"] == 1
    assert call.timeout is not None
    assert call.timeout > 60
    assert (call.attempt, call.in_background) == (0, False)
    assert answer == gradserve.CallAnswer(way, answer.num_bytes, 1)
    (attempt,) = [each for each, _ in seen.attempts if each.method == PUSH_PULL]
    assert (attempt.attempt, attempt.metadata) == (1, (("x-request-id", "run-7"),))
    assert [each["x-request-id"] for each in arrived.of("PushPull")] == ["run-7"]
    if way != "grpc":  # the call that asks for the socket is made for another one
        assert {each["x-request-id"] for each in arrived.of("IssueTicket")} == {"run-7"}


@both_faces
def test_the_first_is_the_outermost(address: str, name: str, face: Any) -> None:
    notes: list[str] = []
    face(address, name, [Seen("outer", notes), Seen("inner", notes)], "grpc")
    assert notes[:4] == ["outer before", "inner before", "inner after", "outer after"]
    assert len(notes) % 4 == 0


@both_faces
def test_a_repeated_attempt(address: str, faults: Faults, name: str, face: Any) -> None:
    dropped = faults.drop_reply("PushPull")
    seen = Seen()
    face(address, name, [seen], "grpc")
    assert dropped.happened == ["PushPull"]
    ((_, answer),) = seen.of(PUSH_PULL)
    assert answer.attempts == 2
    attempts = [(call.attempt, outcome) for call, outcome in seen.attempts if call.method == PUSH_PULL]
    assert [number for number, _ in attempts] == [1, 2]
    assert isinstance(attempts[0][1], gradserve.UnavailableError)


class Again(gradserve.Interceptor):
    """Makes each call again after an InternalError, once."""

    def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
        try:
            yield None
        except gradserve.InternalError:
            yield None


@both_faces
def test_a_call_made_again_counts_once(address: str, faults: Faults, name: str, face: Any) -> None:
    failed = faults.fail_at("a", 0)
    seen = Seen()
    face(address, name, [Again(), seen], "grpc")
    assert failed.happened == ["PushPull"]
    assert [type(outcome) for _, outcome in seen.of(PUSH_PULL)] == [gradserve.InternalError, gradserve.CallAnswer]
    with gradserve.connect(address) as client:
        assert client.gradient_accumulator(ZEROS, shared_name=name, container="team").info().global_step == 1


def test_a_call_that_can_be_made_only_once(address: str, faults: Faults) -> None:
    """The last read of a tensor is not repeated, whatever an interceptor wants."""

    class Always(gradserve.Interceptor):
        def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
            for _ in range(3):
                try:
                    yield None
                except gradserve.GradserveError:
                    continue
                return

    with gradserve.connect(address, transport="bulk", interceptors=[Always()]) as client:
        handle = client.put(np.zeros(3))
        dropped = faults.drop_reply("ReadTensors", times=None)
        with pytest.raises(gradserve.UnavailableError, match="the reply was dropped"):
            client.get(handle, release=True)
        assert dropped.happened == ["ReadTensors"]


class Raising(gradserve.Interceptor):
    """Raises an error before or after calls of a method, or before attempts."""

    def __init__(self, method: str, when: str, error: BaseException) -> None:
        self.method = method
        self.when = when
        self.error = error
        self.has_ended = 0

    def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
        try:
            if (call.method, self.when) == (self.method, "before"):
                raise self.error
            yield None
            if (call.method, self.when) == (self.method, "after"):
                raise self.error
        finally:
            self.has_ended += 1

    def around_attempt(self, call: gradserve.CallInfo) -> gradserve.Around:
        if (call.method, self.when) == (self.method, "attempt"):
            raise self.error
        yield None


@pytest.mark.parametrize("when", ["before", "after", "attempt"])
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), gradserve.NotFoundError("mine")], ids=["any", "ours"])
@both_faces
def test_an_error_reaches_the_caller_unchanged(
    address: str, arrived: Arrived, name: str, face: Any, when: str, error: Exception
) -> None:
    raising, outer = Raising(PUSH_PULL, when, error), Seen()
    with pytest.raises(type(error)) as raised:
        face(address, name, [outer, raising], "grpc")
    assert raised.value is error
    assert len(arrived.of("PushPull")) == (when == "after")
    assert outer.notes.count(" before") == outer.notes.count(" after")


@both_faces
def test_an_error_leaves_nothing_behind(address: str, name: str, face: Any) -> None:
    raising = Raising(PUSH_PULL, "before", ZeroDivisionError("mine"))
    with pytest.raises(ZeroDivisionError):
        face(address, name, [raising], "grpc")
    face(address, name, [], "grpc")  # the same worker pushes at the same step


def test_an_error_after_an_upload(address: str, name: str) -> None:
    """What was uploaded for a call that is not made is deleted."""
    large = {"w": np.zeros(1 << 21, np.float32)}

    class AfterUploads(gradserve.Interceptor):
        def __init__(self) -> None:
            self.uploads = 0

        def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
            if call.method == APPLY and self.uploads:
                raise ZeroDivisionError
            yield None
            self.uploads += call.method.endswith("PutTensors")

    with (
        gradserve.connect(address, transport="grpc", interceptors=[AfterUploads()]) as client,
        gradserve.connect(address) as other,
    ):
        net = client.gradient_accumulator(large, shared_name=name)
        with pytest.raises(ZeroDivisionError):
            net.apply_grad(large, 0)
        eventually(other.list_tensors, lambda found: not found)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (0, "has not made the call: it must yield"),
        (2, "has yielded again, although the call was answered"),
    ],
)
def test_interceptors_that_do_not_yield_once(address: str, times: int, message: str) -> None:
    class Wrong(gradserve.Interceptor):
        def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
            for _ in range(times):
                yield None

    with (
        pytest.raises(RuntimeError, match=rf"Wrong.around_call {message}"),
        gradserve.connect(address, interceptors=[Wrong()]) as client,
    ):
        client.server_info()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"X-Team": "a"},
            "keys in lower case that neither begin with grpc- nor end with -bin for metadata, got",
        ),
        ({"grpc-timeout": "1S"}, "expected keys in lower case"),
        ({"trace-bin": "a"}, "expected keys in lower case"),
        ({"x-team": "a\nauthorization:b"}, "expected visible ASCII characters and spaces for metadata 'x-team'"),
        ({"x-team": 7}, "expected visible ASCII characters and spaces for metadata 'x-team'"),
    ],
    ids=["upper case", "grpc", "binary", "line feed", "number"],
)
def test_metadata_that_cannot_travel(address: str, metadata: Any, message: str) -> None:
    class Adding(gradserve.Interceptor):
        def around_attempt(self, call: gradserve.CallInfo) -> gradserve.Around:
            yield metadata

    with (
        gradserve.connect(address, interceptors=[Adding()]) as client,
        pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)),
    ):
        client.server_info()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Seen(), "expected a list of gradserve.Interceptor for interceptors, got Seen"),
        (["x"], r"expected a gradserve.Interceptor for interceptors\[0\], got 'x'"),
        ([Seen], r"expected a gradserve.Interceptor for interceptors\[0\], got Seen"),
    ],
)
@pytest.mark.parametrize("connect", [gradserve.connect, gradserve.aio.connect])
def test_arguments_that_are_no_interceptors(connect: Any, given: Any, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=message) as raised:
        connect("localhost", interceptors=given)
    assert raised.value.field == "interceptors"


def test_calls_in_the_background(address: str, arrived: Arrived) -> None:
    """The client renews its lease by itself, and servers behind a gateway want the key of that call, too."""
    seen = Seen()
    with gradserve.connect(address, interceptors=[seen]) as client:
        client.conditional_accumulator("float32", shape=())
        eventually(lambda: arrived.of("HoldClientLease"), bool)
        assert arrived.of("HoldClientLease")[0]["x-request-id"] == "run-7"


def test_calls_at_the_same_time_keep_the_context_of_their_caller(address: str, name: str) -> None:
    """Interceptors run in the thread of the caller, also where calls are made in others."""
    step: contextvars.ContextVar[int] = contextvars.ContextVar("step")
    found = []

    class Step(gradserve.Interceptor):
        def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
            found.append(step.get(-1))
            yield None

    with gradserve.connect(address, interceptors=[Step()]) as client:
        token = step.set(3)
        client.gradient_accumulator(ZEROS, shared_name=name).apply_grad(ZEROS, 0)
        step.reset(token)
    assert found[:2] == [3, 3]


def test_a_task_that_is_cancelled_ends_the_interceptor(address: str, name: str) -> None:
    seen = Seen()

    async def run() -> None:
        async with gradserve.aio.connect(address, interceptors=[seen]) as client:
            net = await client.gradient_accumulator(ZEROS, shared_name=name)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await net.take_grad(1)

    asyncio.run(run())
    assert seen.notes.count(" before") == seen.notes.count(" after")


def test_without_a_server(name: str) -> None:
    seen = Seen()
    with (
        no_server() as nobody,
        gradserve.connect(nobody, interceptors=[seen]) as client,
        pytest.raises(gradserve.UnavailableError),
    ):
        client.server_info()
    call, error = seen.calls[0]
    assert (call.method, type(error)) == ("gradserve.v1.ServerService/GetServerInfo", gradserve.UnavailableError)


class Token(gradserve.Interceptor):
    """Shows a token that changes."""

    def __init__(self, token: str) -> None:
        self.token = token

    def around_attempt(self, call: gradserve.CallInfo) -> gradserve.Around:
        yield {"authorization": f"Bearer {self.token}"}


def test_who_calls(tmp_path: Path) -> None:
    """The token of a call counts in place of the client's, and the call takes no socket of another identity."""
    token = Token(TOKENS["admin"])
    with serving(tmp_path / "access.toml", all_entries()) as local:
        with gradserve.connect(local.address, token=TOKENS["idle"], interceptors=[token]) as client:
            assert client.list_tensors() == []
            assert client.server_info().transport.way == "grpc"
            token.token = "wrong"
            with pytest.raises(gradserve.UnauthenticatedError):
                client.list_tensors()
            token.token = TOKENS["admin"]
        with (
            gradserve.connect(local.address, transport="bulk", interceptors=[token]) as client,
            pytest.raises(gradserve.InvalidArgumentError, match="expected auto or grpc for calls of metadata"),
        ):
            client.server_info()
