"""When a call has ended for its caller, nobody reads its memory, whatever has ended it.

Every call that takes arrays, from both faces, on every way, to one server, to several that share a model, and to an
aggregator, while servers are late with gradients: before they look at them, or before they add what they have looked
at. As soon as the calls have ended, their arrays are overwritten, and other calls are made with other values. What
counted then has to be what was sent, once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
import gradserve.aio
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import TimeLimits
from gradserve.transport.aio.transport import AsyncNetworkTransport
from gradserve.transport.blocking.transport import NetworkTransport
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_protocol.address import Address
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, running_cluster
from tests.cluster.sharding.clients import all_sharded
from tests.servers.connecting import NO_RETRIES, aio_client_over, change_times, client_over
from tests.servers.holding import Hold
from tests.servers.polling import PATIENCE_SECONDS, eventually_async
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import running_tree

WAYS = [Transport.GRPC, Transport.BULK, Transport.SHARED_MEMORY]
SIZE = 40_000
"""Their 160 kB travel beside the message, and in regions where there are some."""
VALUES = np.arange(SIZE, dtype=np.float32)
POISON = np.nan
BRIEF = TimeLimits(0.5, reply=0.2, slowest_bytes_per_second=1e9)
PATIENT = TimeLimits(PATIENCE_SECONDS)
KINDS: dict[str, dict[str, Any]] = {
    "added in place": {},
    "held": {"deterministic": True},
    "checked": {"refuse_non_finite": True},
}


# Faces


class AsyncFace:
    """A client of the asyncio face."""

    def __init__(self, addresses: list[str], settings: ConnectionSettings) -> None:
        transport = AsyncNetworkTransport(tuple(map(Address.to_connect, addresses)), settings)
        calls = ClientCalls.of_new_client(settings.times, addresses=addresses)
        self.client: Any = aio_client_over(transport, addresses[0], calls)

    def begin(self, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        async def called() -> Any:
            return await function(*args, **kwargs)

        return asyncio.create_task(called())


class BlockingFace:
    """A client of the blocking face, each of whose calls has a thread."""

    def __init__(self, addresses: list[str], settings: ConnectionSettings) -> None:
        transport = NetworkTransport(tuple(map(Address.to_connect, addresses)), settings)
        calls = ClientCalls.of_new_client(settings.times, addresses=addresses)
        self.client: Any = client_over(transport, addresses[0], calls)
        self._threads = ThreadPoolExecutor(32)

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))


Face = AsyncFace | BlockingFace
FACES: dict[str, type[Face]] = {"aio": AsyncFace, "blocking": BlockingFace}


# Servers


@contextmanager
def one() -> Iterator[list[str]]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield [server.address]


@contextmanager
def several() -> Iterator[list[str]]:
    with all_sharded(), running_cluster(2) as servers:
        yield addresses_of(servers)


@contextmanager
def an_aggregator() -> Iterator[list[str]]:
    with running_tree(1) as (_, near):
        yield [near.address]


SERVERS = {"one server": one, "sharded": several, "an aggregator": an_aggregator}


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each == "one server" else pytest.mark.exhaustive) for each in SERVERS],
)
def addresses(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    with SERVERS[request.param]() as found:
        yield found


# Calls


@dataclass
class Sent:
    """A gradient that a call brings.

    Attributes:
        model: The accumulator, from the face of the call.
        method: How it is sent.
        array: Where its values are.
        number: The request id of the call.
        fields: What the accumulator was made with.
    """

    model: Any
    method: str
    array: NDArray[np.float32]
    number: int
    fields: dict[str, Any]

    def send(self, face: Face, timeout: float | None) -> asyncio.Future[Any]:
        how: dict[str, Any] = {"worker_id": "w", "request_id": self.number}
        if self.method == "push_pull":
            how |= {"num_required": 1, "timeout": timeout}
        return face.begin(getattr(self.model, self.method), {"w": self.array}, **how)


@dataclass
class Work:
    """What one client does."""

    face: Face
    sent: list[Sent] = field(default_factory=list)
    overwritten: list[NDArray[np.float32]] = field(default_factory=list)

    async def prepare(self, name: str) -> None:
        """Makes an accumulator for each kind, each way to send, and each sort of array."""
        client = self.face.client
        for kind, fields in KINDS.items():
            for method in ("apply_grad", "push_pull"):
                for sort in ("ordinary", "shared"):
                    shared_name = f"{name} {kind} {method} {sort}"
                    model = await self.face.begin(client.gradient_accumulator, {"w": VALUES}, shared_name, **fields)
                    array = np.empty_like(VALUES) if sort == "ordinary" else await self.shared_array()
                    array[:] = VALUES
                    self.sent.append(Sent(model, method, array, 1000 + len(self.sent), fields))

    async def shared_array(self) -> NDArray[np.float32]:
        array: NDArray[np.float32] = await self.face.begin(self.face.client.empty, VALUES.shape, np.float32)
        return array

    def begin(self, times: TimeLimits = PATIENT) -> list[asyncio.Future[Any]]:
        change_times(self.face.client, times)
        return [each.send(self.face, times.call) for each in self.sent]

    async def overwrite(self, *, is_connected: bool = True) -> None:
        """Does what a program may do after its calls: writes to the arrays, and makes others with their memory."""
        for each in self.sent:
            each.array[:] = POISON
        if is_connected:
            change_times(self.face.client, PATIENT)
            poison = np.full_like(VALUES, POISON)
            for _ in self.sent:
                handle = await self.face.begin(self.face.client.put, poison)
                await self.face.begin(self.face.client.delete, handle)

    async def repeat(self) -> None:
        """Makes the calls again, with the same ids and the same values, and waits for their answers.

        What was overwritten stays so: a server that is late may still look at it.
        """
        self.overwritten += [each.array for each in self.sent]
        for each in self.sent:
            each.array = VALUES.copy()
        results = await asyncio.gather(*self.begin())
        await self.overwrite()
        for each, result in zip(self.sent, results, strict=True):
            if each.method == "push_pull":
                np.testing.assert_array_equal(result["w"], VALUES)
            else:
                assert result.outcome is gradserve.ACCEPTED

    async def close(self) -> None:
        await self.face.begin(self.face.client.close, timeout=0)


async def check(sent: Sent, addresses: list[str], *, least: int) -> None:
    """Checks that the gradient is in at most one average of its accumulator, with the values that were sent."""

    def look() -> None:
        with gradserve.connect(addresses, timeout=PATIENCE_SECONDS, transport="grpc") as client:
            model = client.gradient_accumulator({"w": VALUES}, sent.model.name, **sent.fields)
            count = model.num_accumulated()
            averages = [model.take_grad(count)] if count else []
            if step := model.info().global_step - len(averages):
                averages.append(model.read_average(step))
            assert least <= len(averages) <= 1
            for each in averages:
                assert each.num_gradients == 1
                np.testing.assert_array_equal(each["w"], VALUES)

    await asyncio.to_thread(look)


@pytest.fixture(params=["check", "commit"], ids=["before they are looked at", "before they are added"])
def hold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Hold:
    return Hold(monkeypatch, before=request.param)


Ends = Callable[[Work, list[asyncio.Future[Any]]], Coroutine[Any, Any, None]]


async def _wait(_work: Work, _calls: list[asyncio.Future[Any]]) -> None:
    """The clients' limit of time ends the calls."""


async def _cancel(_work: Work, calls: list[asyncio.Future[Any]]) -> None:
    for each in calls:
        each.cancel()


async def _close(work: Work, _calls: list[asyncio.Future[Any]]) -> None:
    await work.close()


ENDS: dict[str, tuple[Ends, TimeLimits, type[BaseException]]] = {
    "deadline": (_wait, BRIEF, gradserve.DeadlineExceededError),
    "cancelled": (_cancel, PATIENT, asyncio.CancelledError),
    "closed": (_close, PATIENT, gradserve.CallCancelledError),
}

CASES = [
    pytest.param(way, face, end, id=f"{way}-{face}-{end}")
    for way in WAYS
    for face in FACES
    for end in ENDS
    if (face, end) != ("blocking", "cancelled")
]


@pytest.mark.sampled
@pytest.mark.parametrize(("way", "face", "end"), CASES)
async def test_calls_without_an_answer(
    addresses: list[str], way: Transport, face: str, end: str, hold: Hold, name: str
) -> None:
    ends, times, error = ENDS[end]
    work = Work(FACES[face](addresses, ConnectionSettings(PATIENT, NO_RETRIES, transport=way)))
    await work.prepare(name)
    with hold.closed():
        calls = work.begin(times)
        if times is PATIENT:
            await eventually_async(_is_held(hold, len(calls)))
        await ends(work, calls)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in ended} == {error}, ended
        await work.overwrite(is_connected=end != "closed")
    if end != "closed":
        await work.repeat()
        await work.close()
    for each in work.sent:
        await check(each, addresses, least=int(end != "closed"))


def _is_held(hold: Hold, count: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return hold.num_held >= count

    return look


@pytest.mark.sampled
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("way", WAYS)
async def test_calls_with_an_answer(addresses: list[str], way: Transport, face: str, name: str) -> None:
    work = Work(FACES[face](addresses, ConnectionSettings(PATIENT, NO_RETRIES, transport=way)))
    await work.prepare(name)
    await asyncio.gather(*work.begin())
    await work.overwrite()
    await work.repeat()
    client = work.face.client
    array = await work.shared_array()
    array[:] = VALUES
    handle = await work.face.begin(client.put, array)
    array[:] = POISON
    np.testing.assert_array_equal(await work.face.begin(client.get, handle), VALUES)
    await work.face.begin(client.delete, handle)
    await work.close()
    for each in work.sent:
        await check(each, addresses, least=1)
