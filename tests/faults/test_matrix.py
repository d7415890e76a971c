"""Every operation x every fault x every way: who got what, what counted, and nothing is left.

A fault is done to all operations at once: to each before it is carried out, and to those that wait while they wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

import gradserve
import gradserve.aio
from gradserve.calls.exchange import TimeLimits
from gradserve.testing import Faults, FaultyProxy
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.faults.gate import Gate
from tests.faults.operations import METHODS, OPERATIONS, WAITING, Operation, Place
from tests.servers.announcing import behind
from tests.servers.connecting import NO_RETRIES, connect_with_aio
from tests.servers.held import Held, held_by
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async

T = TypeVar("T")

ALL = OPERATIONS | WAITING
WAYS = [Transport.GRPC, Transport.BULK, Transport.SHARED_MEMORY]
BRIEF = TimeLimits(0.5, reply=0.2, slowest_bytes_per_second=1e9)
PATIENT = TimeLimits(PATIENCE_SECONDS)
CONFIG = ServerConfig(runtime=RuntimeConfig(warm_up=False, drain_seconds=0.2))


@dataclass
class Crew:
    """A server, and what can be done to its calls.

    Attributes:
        local: The server.
        way: How the clients of the operations call.
        network: Lies between them and the server.
        direct: A client over which nothing fails.
    """

    local: LocalServer
    way: Transport
    network: FaultyProxy
    address: str
    direct: gradserve.Client
    gate: Gate
    faults: Faults
    places: dict[str, Place] = field(default_factory=dict)

    def connect(self, times: TimeLimits = PATIENT) -> gradserve.aio.Client:
        """Returns a client that does not repeat calls by itself."""
        return connect_with_aio(self.address, ConnectionSettings(times, NO_RETRIES, transport=self.way))

    def prepare(self, name: str, operations: dict[str, Operation]) -> None:
        for each, operation in operations.items():
            place = Place(f"{name}-{each}", self.direct)
            self.places[each] = Place(place.name, self.direct, operation.prepare(place))

    def num_waiting(self) -> int:
        """Returns how many calls the server holds for others."""
        return self.local.inspect(lambda server: server.registry.factory.waiters.used)

    def held(self) -> Held:
        """Returns what the server holds; both sides of a connection forget regions with a call."""
        self.direct.server_info()
        return held_by(self.local)

    def clear(self) -> None:
        """Deletes what was prepared."""
        for name, place in self.places.items():
            if isinstance(place.given, gradserve.TensorHandle):
                self.direct.delete(place.given)
            elif name in ("forward", "backward"):
                self.direct.delete_batch_norm_layer(place.name)
        for each in self.direct.list_accumulators():
            self.direct.delete_accumulator(each.name)
        self.places.clear()

    def begin(self, client: gradserve.aio.Client) -> dict[str, asyncio.Task[Any]]:
        """Begins every operation."""
        return {
            name: asyncio.create_task(_awaited(operation.begin(client, self.places[name], None)))
            for name, operation in ALL.items()
        }

    def under_way(self) -> tuple[int, int]:
        """Returns how many calls are held, and how many wait for others."""
        return self.gate.num_held, self.num_waiting()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _async(look: Callable[[], T]) -> Callable[[], Awaitable[T]]:
    async def looked() -> T:
        return await asyncio.to_thread(look)

    return looked


@dataclass(frozen=True)
class Served:
    """A server, and what is done to its calls."""

    local: LocalServer
    gate: Gate
    faults: Faults


@pytest.fixture(scope="module")
def served(_compiled_kernels: None) -> Iterator[Served]:
    gate, faults = Gate(), Faults()
    with LocalServer(CONFIG, Parts(interceptors=(gate, faults))) as local:
        local.wait_until_prepared()
        yield Served(local, gate, faults)


@pytest.fixture(scope="module", params=WAYS, ids=str)
def crew(request: pytest.FixtureRequest, served: Served) -> Iterator[Crew]:
    local = served.local
    with (
        behind(local, request.param) as (network, address),
        gradserve.connect(local.address, transport="grpc", timeout=PATIENCE_SECONDS) as direct,
    ):
        crew = Crew(local, request.param, network, address, direct, served.gate, served.faults)
        asyncio.run(_use_everything_once(crew))
        yield crew


async def _use_everything_once(crew: Crew) -> None:
    """Whatever first calls leave in the process is there from now on."""
    crew.prepare("first", OPERATIONS)
    async with crew.connect() as client:
        for name, operation in OPERATIONS.items():
            assert operation.is_right(await operation.begin(client, crew.places[name], None)), name
    crew.clear()


@pytest.fixture
def held(crew: Crew, name: str) -> Iterator[None]:
    """After the test, the server holds no more than before."""
    before = crew.held()
    crew.prepare(name, ALL)
    yield
    crew.gate.is_closed = False
    crew.network.heal()
    crew.faults.clear()
    crew.clear()
    eventually(crew.held, lambda held: held.is_no_more_than(before))


async def _cancel(crew: Crew, tasks: dict[str, asyncio.Task[Any]]) -> None:
    await eventually_async(_async(crew.under_way), (len(OPERATIONS), len(WAITING)).__eq__)
    for task in tasks.values():
        task.cancel()


async def _end_client(crew: Crew, _tasks: dict[str, asyncio.Task[Any]]) -> None:
    await eventually_async(_async(crew.under_way), (len(OPERATIONS), len(WAITING)).__eq__)
    crew.network.cut()


async def _wait(_crew: Crew, _tasks: dict[str, asyncio.Task[Any]]) -> None:
    """The client's limit of time is the fault."""


Do = Callable[[Crew, dict[str, asyncio.Task[Any]]], Awaitable[None]]

FAULTS: dict[str, tuple[Do, TimeLimits, type[BaseException]]] = {
    "cancelled": (_cancel, PATIENT, asyncio.CancelledError),
    "deadline": (_wait, BRIEF, gradserve.DeadlineExceededError),
    "client gone": (_end_client, PATIENT, gradserve.UnavailableError),
}
"""What is done, the time limits of the clients, and what the calls raise."""

STAYS = {"push_pull, waiting": 1}
"""The effects that a call has had before it waits: the gradient of a push_pull is in the round, and stays there."""


@pytest.mark.sampled
@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_was_not_carried_out_changes_nothing(crew: Crew, fault: str) -> None:
    do, times, error = FAULTS[fault]
    before = {name: operation.count(crew.places[name]) for name, operation in ALL.items()}
    async with crew.connect(times) as client:
        crew.gate.is_closed = True
        tasks = crew.begin(client)
        await do(crew, tasks)
        ended = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        assert {name: type(each) for name, each in ended.items()} == dict.fromkeys(tasks, error)
        # The server has noticed, too.
        await eventually_async(_async(crew.under_way), (0, 0).__eq__)
        crew.gate.is_closed = False
        crew.network.heal()
    for name, operation in ALL.items():
        count = operation.count(crew.places[name]) - before[name]
        # On a slow machine, the time may be over before the gradient is there.
        assert count == STAYS.get(name, 0) or (fault == "deadline" and count == 0), name


@pytest.mark.usefixtures("held")
async def test_what_lost_its_reply_counts_once_when_it_is_repeated(crew: Crew) -> None:
    before = {name: operation.count(crew.places[name]) for name, operation in OPERATIONS.items()}
    lost = crew.faults.drop_reply(*METHODS, times=None)
    async with crew.connect() as client:
        errors = {}
        for name, operation in OPERATIONS.items():
            with pytest.raises(gradserve.UnavailableError, match="the reply was dropped") as raised:
                await operation.begin(client, crew.places[name], None)
            errors[name] = raised.value
        assert len(lost.happened) >= len(OPERATIONS)
        crew.faults.clear()
        for name, operation in OPERATIONS.items():
            result = await operation.begin(client, crew.places[name], errors[name].request_id)
            assert operation.is_right(result), name
    counts = {name: operation.count(crew.places[name]) - before[name] for name, operation in OPERATIONS.items()}
    assert counts == dict.fromkeys(OPERATIONS, 0) | dict.fromkeys(("apply", "take", "push_pull", "forward"), 1)
