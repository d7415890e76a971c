"""What ends accumulators and layers that nobody deletes, by a simulated clock."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_server.layers.batch_norm.registry import Reuse
from gradserve_server.resources import lifetimes as lifetimes_module
from gradserve_server.resources.lifetimes import Lifetime, Lifetimes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.runtime.event_loop import Turn
from tests.accumulators.bench import Bench, apply, take, turns
from tests.layers.bench import LayerBench, config_of

CLIENT_LEASE = 60.0
KEY, OTHER = ResourceKey("default", "net"), ResourceKey("default", "other")


class World:
    """A registry, and the time."""

    def __init__(self, kind: str) -> None:
        self.bench: Any = Bench() if kind == "accumulator" else LayerBench()
        self.registry: Any = self.bench.registry
        self.lifetimes: Lifetimes = self.bench.lifetimes

    def create(self, key: ResourceKey = KEY, **lifetime: Any) -> Any:
        if isinstance(self.bench, Bench):
            return self.bench.accumulator(key=key, lifetime=Lifetime(**lifetime))
        return self.registry.create(key, config_of(), Reuse.ALLOWED, "", Lifetime(**lifetime))[0]

    @property
    def num_counted(self) -> int:
        """The number of accumulators or layers that the budget counts."""
        used: int = (self.registry.factory if isinstance(self.bench, Bench) else self.registry).count.used
        return used

    def after(self, seconds: float) -> int:
        """Lets time pass; returns how much has ended."""
        self.bench.now += seconds
        return self.lifetimes.expire(Turn(1000))

    def has(self, key: ResourceKey = KEY) -> bool:
        return bool(self.registry.page(key.container, "", 1000, **self._any) and self._find(key))

    @property
    def _any(self) -> dict[str, str]:
        return {} if isinstance(self.bench, Bench) else {"scope": "", "collection": ""}

    def _find(self, key: ResourceKey) -> bool:
        try:
            self.registry.get(key)
        except NotFoundError:
            return False
        return True

    def use(self, key: ResourceKey = KEY) -> None:
        with self.registry.use(key):
            pass


@pytest.fixture(params=["accumulator", "layer"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


# --- One that nobody uses


def test_without_a_lifetime_nothing_ends(world: World) -> None:
    world.create()
    assert world.after(1e9) == 0
    assert world.has()
    assert world.lifetimes.num_leases == 0


def test_what_nobody_uses_ends(world: World) -> None:
    world.create(idle_lease=100)
    assert world.after(99.9) == 0
    assert world.after(0.1) == 1
    assert not world.has()
    assert world.num_counted == 0
    assert world.lifetimes.num_leases == 0


def recreate(world: World) -> None:
    world.create(idle_lease=100)


@pytest.mark.parametrize("act", [World.use, recreate])
def test_use_renews_it(world: World, act: Callable[[World], None]) -> None:
    world.create(idle_lease=100)
    for _ in range(3):
        assert world.after(99) == 0
        act(world)
    assert world.after(99.9) == 0
    assert world.after(0.1) == 1


def test_lists_do_not(world: World) -> None:
    world.create(idle_lease=100)
    world.after(99)
    assert world.has()
    assert world.after(1) == 1


def test_a_call_under_way_keeps_it(world: World) -> None:
    world.create(idle_lease=1)
    with world.registry.use(KEY):
        assert world.after(1000) == 0
    assert world.after(0.9) == 0
    assert world.after(0.2) == 1


def test_whoever_asks_for_it_is_told_why(world: World) -> None:
    world.create(idle_lease=2.5)
    world.after(3)
    kind = "accumulator" if isinstance(world.bench, Bench) else "layer"
    with pytest.raises(NotFoundError) as error, world.registry.use(KEY):
        pass
    assert error.value.message == f"no {kind} 'default/net' any more: nobody used it for 2.5 s, its idle_lease"
    assert error.value.field == f"{kind}.name"
    with pytest.raises(NotFoundError, match="any more"):
        world.registry.get(KEY, "some incarnation")
    with pytest.raises(NotFoundError, match=f"no {kind} 'default/other'$"):
        world.registry.get(OTHER)


def test_a_new_one_of_the_name_is_another(world: World) -> None:
    first = world.create(idle_lease=1)
    world.after(2)
    second = world.create(idle_lease=5)
    with pytest.raises(NotFoundError, match="another one has this name now"):
        world.registry.get(KEY, first.incarnation)
    assert world.registry.delete(KEY, second.incarnation)
    with pytest.raises(NotFoundError, match="net'$"):
        world.registry.get(KEY)


def test_the_reasons_remembered_are_few(world: World) -> None:
    directory = world.registry._directory if isinstance(world.bench, Bench) else world.registry._layers
    directory._tombstones._capacity = 3
    keys = [ResourceKey("default", f"n{index}") for index in range(5)]
    for key in keys:
        world.create(key, idle_lease=1)
        world.after(1)
    for key in keys:
        with pytest.raises(NotFoundError, match="any more" if key in keys[2:] else "n.'$"):
            world.registry.get(key)


def test_one_that_is_deleted_leaves_nothing(world: World) -> None:
    world.create(idle_lease=100, owner="a")
    assert world.registry.delete(KEY)
    assert world.lifetimes.num_leases == len(world.lifetimes.clients) == 0
    assert world.after(1000) == 0


# --- Private ones


def test_what_is_private_ends_with_the_lease_of_its_client(world: World) -> None:
    world.create(owner="a")
    world.create(OTHER, owner="b")
    world.after(30)
    world.use(OTHER)
    assert world.after(29.9) == 0
    assert world.after(0.1) == 1
    assert not world.has()
    assert world.has(OTHER)
    assert len(world.lifetimes.clients) == 1
    with pytest.raises(NotFoundError, match="any more: it was private to a client, whose lease of 60 s has ended"):
        world.registry.get(KEY)


def test_any_use_of_anything_it_owns_renews_the_lease_of_a_client(world: World) -> None:
    world.create(owner="a")
    world.create(OTHER, owner="a")
    for _ in range(3):
        world.after(50)
        world.use(OTHER)
    assert world.has()
    with world.registry.use(OTHER):
        assert world.after(1000) == 0
    assert world.after(59.9) == 0
    assert world.after(0.1) == 2


def test_both_lifetimes_at_once(world: World) -> None:
    world.create(owner="a", idle_lease=10)
    world.create(OTHER, owner="a", idle_lease=1000)
    world.after(9)
    world.use(OTHER)
    assert world.after(1) == 1
    assert not world.has()
    assert world.after(59) == 1
    assert world.lifetimes.num_leases == len(world.lifetimes.clients) == 0


def test_the_id_of_a_client_that_lost_all_can_be_used_again(world: World) -> None:
    world.create(owner="a")
    world.after(60)
    world.create(owner="a")
    assert world.after(59) == 0
    assert world.after(1) == 1


def test_many_end_a_few_at_a_time(world: World) -> None:
    for index in range(50):
        world.create(ResourceKey("default", f"n{index}"), owner="a" if index % 2 else f"c{index}")
        world.create(ResourceKey("default", f"i{index}"), idle_lease=1)
    world.bench.now += 1000
    counts = []
    is_over = True
    while is_over:
        turn = Turn(8)
        counts.append(world.lifetimes.expire(turn))
        is_over = turn.is_over
    assert sum(counts) == 100
    assert max(counts) <= 8
    assert world.num_counted == 0


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"owner": "a"}, {}, "it is private to another client"),
        ({"owner": "a"}, {"owner": "b"}, "it is private to another client"),
        ({}, {"owner": "b"}, "it is shared, not private"),
        ({}, {"idle_lease": 5}, "idle_lease is None, not 5 s"),
        ({"idle_lease": 0.5}, {"idle_lease": 5}, "idle_lease is 0.5 s, not 5 s"),
        ({"owner": "a", "idle_lease": 5}, {}, "it is private to another client; idle_lease is 5 s, not None"),
    ],
)
def test_the_same_name_with_another_lifetime(
    world: World, first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    world.create(**first)
    with pytest.raises(AlreadyExistsError) as error:
        world.create(**second)
    assert error.value.message.endswith(f"'default/net' exists with another lifetime: {words}")
    assert error.value.field == "lifetime"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_idle_lease_that_cannot_be(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a positive idle_lease, got") as error:
        Lifetime(idle_lease=seconds)
    assert error.value.field == "lifetime.idle_lease"


def test_an_owner_that_cannot_be() -> None:
    Lifetime(owner="é" * 64)
    with pytest.raises(InvalidArgumentError, match="expected at most 128 bytes, got 130") as error:
        Lifetime(owner="é" * 65)
    assert error.value.field == "lifetime.owner_client_id"


# --- Those who wait


async def test_a_take_keeps_a_private_accumulator_and_is_told_when_its_client_is_closed() -> None:
    bench = Bench()
    acc = bench.accumulator(key=KEY, lifetime=Lifetime(owner="a"))

    async def take_one() -> Any:
        with bench.registry.use(KEY):
            return await take(acc, 1)

    waiting = asyncio.create_task(take_one())
    await turns()
    bench.now += 1000
    assert bench.lifetimes.expire(Turn(10)) == 0
    assert await bench.lifetimes.clients.end("a") == 1
    with pytest.raises(
        AbortedError, match="accumulator 'default/net' was deleted: it was private to a client that was closed"
    ):
        await waiting
    with pytest.raises(AbortedError, match="was deleted: it was private"):
        await apply(acc, 1)
    assert bench.memory.used == bench.registry.factory.waiters.used == bench.registry.factory.count.used == 0


# --- Holding


@pytest.fixture
def lifetimes(world: World) -> Lifetimes:
    return world.lifetimes


async def test_a_hold_keeps_what_a_client_owns(world: World) -> None:
    world.create(owner="a")
    holding = asyncio.create_task(world.lifetimes.clients.hold("a"))
    await turns()
    assert world.after(1000) == 0
    world.create(OTHER, owner="a")
    assert world.after(1000) == 0
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert world.after(59.9) == 0
    assert world.after(0.1) == 2


async def test_a_hold_ends_when_the_client_owns_nothing_any_more(world: World) -> None:
    clients = world.lifetimes.clients
    assert not await clients.hold("a")
    world.create(owner="a")
    world.create(OTHER, owner="a")
    holding = asyncio.create_task(clients.hold("a"))
    await turns()
    world.registry.delete(KEY)
    await turns()
    assert not holding.done()
    world.registry.delete(OTHER)
    assert await holding is False
    assert len(clients) == world.lifetimes.num_leases == 0


async def test_a_later_hold_takes_the_place_of_an_earlier_one(world: World) -> None:
    """The connection of the earlier one may be dead, and the server not know it yet."""
    clients = world.lifetimes.clients
    world.create(owner="a")
    first = asyncio.create_task(clients.hold("a"))
    await turns()
    second = asyncio.create_task(clients.hold("a"))
    await turns()
    assert await first is True
    assert world.after(1000) == 0
    assert await clients.end("a") == 1
    assert await second is False
    assert await clients.end("a") == 0


async def test_a_worker_that_owns_nothing_has_a_lease(world: World) -> None:
    clients = world.lifetimes.clients
    holding = asyncio.create_task(clients.hold("a", "calls of a"))
    await turns()
    assert world.after(1000) == 0
    assert clients.has_worker("calls of a")
    assert not clients.has_worker("a")
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert world.after(59.9) == 0
    assert clients.has_worker("calls of a"), "it may come back"
    assert world.after(0.1) == 0
    assert not clients.has_worker("calls of a")
    assert len(clients) == world.lifetimes.num_leases == 0


async def test_a_worker_keeps_its_lease_when_what_it_owned_has_ended(world: World) -> None:
    clients = world.lifetimes.clients
    world.create(owner="a")
    holding = asyncio.create_task(clients.hold("a", "calls of a"))
    await turns()
    world.registry.delete(KEY)
    await turns()
    assert not holding.done()
    assert await clients.end("a") == 0
    assert await holding is False
    assert not clients.has_worker("calls of a")


async def test_a_client_that_becomes_a_worker_is_one_to_the_end(world: World) -> None:
    clients = world.lifetimes.clients
    world.create(owner="a")
    holding = [asyncio.create_task(clients.hold("a", worker)) for worker in ("", "calls of a", "")]
    await turns()
    world.registry.delete(KEY)
    await turns()
    assert [each.done() for each in holding] == [True, True, False]
    await clients.end("a")
    assert await holding[-1] is False


async def test_workers_have_a_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = world.lifetimes.clients
    monkeypatch.setattr(lifetimes_module, "_MOST_WORKERS", 2)
    holding = [asyncio.create_task(clients.hold(name, f"calls of {name}")) for name in "ab"]
    await turns()
    with pytest.raises(ResourceExhaustedError, match="too many workers hold leases: 2 allowed") as error:
        await clients.hold("c", "calls of c")
    assert error.value.field == "worker_client_id"
    assert not clients.has_worker("calls of c")
    again = asyncio.create_task(clients.hold("a", "calls of a"))
    await turns()
    assert await holding[0] is True, "a worker that has a lease needs no other"
    await clients.end("b")
    other = asyncio.create_task(clients.hold("c", "calls of c"))
    await turns()
    assert clients.has_worker("calls of c")
    for each in (again, other):
        each.cancel()


async def test_a_server_that_shuts_down_ends_holds(world: World) -> None:
    clients = world.lifetimes.clients
    world.create(owner="a")
    holding = asyncio.create_task(clients.hold("a"))
    await turns()
    clients.close(UnavailableError("the server is shutting down"))
    for hold in (holding, clients.hold("a")):
        with pytest.raises(UnavailableError):
            await hold


@pytest.mark.parametrize(("client_id", "message"), [("", "got an empty one"), ("x" * 129, "at most 128 bytes")])
async def test_a_client_that_cannot_be(lifetimes: Lifetimes, client_id: str, message: str) -> None:
    for call in (lifetimes.clients.hold, lifetimes.clients.end):
        with pytest.raises(InvalidArgumentError, match=message) as error:
            await call(client_id)
        assert error.value.field == "client_id"
