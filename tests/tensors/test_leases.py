"""Leases by a simulated clock, handles, and budgets that are checked before a payload comes."""

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest
from pydantic import ByteSize

import gradserve
from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2, tensor_service_pb2_grpc
from gradserve_server.config import LeaseConfig, LimitsConfig, ServerConfig
from gradserve_server.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.memory import Memory
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.tensors.spec import TensorSpec
from gradserve_server.tensors.store import TensorStore
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP
from tests.tensors.keeping import finished, keep_now

DEFAULT_LEASE = 10.0
MAX_LEASE = 100.0
TENSOR_BYTES = 80
SPEC = TensorSpec(np.dtype(np.float64), (10,))


class BoomError(Exception):
    """What goes wrong in a call."""


@dataclass
class World:
    """A store, its clock and its budgets."""

    now: float = 1000.0
    memory: Budget = field(default_factory=lambda: Budget(1000, "bytes of tensor memory"))
    handles: Budget = field(default_factory=lambda: Budget(5, "tensor handles"))
    num_made: int = 0
    pool: BufferPool = field(default_factory=lambda: BufferPool(0))

    def __post_init__(self) -> None:
        self.store = TensorStore(
            pool=self.pool,
            memory=Memory(self.memory),
            handles=self.handles,
            leases=LeaseConfig(default_lease_seconds=DEFAULT_LEASE, max_lease_seconds=MAX_LEASE),
            clock=lambda: self.now,
            new_handle=self._new_handle,
        )

    def _new_handle(self) -> str:
        self.num_made += 1
        return f"h{self.num_made}"

    def put(self, lease: float | None = None, count: int = 1) -> list[str]:
        with self.store.receive([SPEC] * count, lease) as upload:
            return finished(self.store.store(upload))

    def after(self, seconds: float) -> int:
        """Lets time pass; returns how many tensors expired."""
        self.now += seconds
        return self.store.expire(Turn(100))

    @property
    def used(self) -> tuple[int, int]:
        """Bytes and handles."""
        return self.memory.used, self.handles.used


@pytest.fixture
def world() -> World:
    return World()


def is_there(world: World, handle: str) -> bool:
    return any(tensor.handle == handle for tensor in world.store.page(0, 100))


# --- Leases


@pytest.mark.parametrize(
    ("lease", "lives"),
    [(None, DEFAULT_LEASE), (5.0, 5.0), (50.0, 50.0), (MAX_LEASE, MAX_LEASE), (1e9, MAX_LEASE), (1e-3, 1e-3)],
)
async def test_a_tensor_lives_as_long_as_its_lease(world: World, lease: float | None, lives: float) -> None:
    (handle,) = world.put(lease)
    assert world.store.page(0, 1)[0].lease_remaining == pytest.approx(lives)
    assert world.after(lives * 0.99) == 0
    assert is_there(world, handle)
    assert world.after(lives * 0.02) == 1
    assert not is_there(world, handle)
    assert world.used == (0, 0)
    with pytest.raises(NotFoundError):
        async with world.store.use([handle]):
            pass


@pytest.mark.parametrize("lease", [0.0, -1.0, -1e9])
def test_a_lease_is_positive(world: World, lease: float) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a positive lease"):
        world.put(lease)
    with pytest.raises(InvalidArgumentError, match="expected a positive lease"):
        keep_now(world.store, [np.zeros(10)], lease, shared=True)
    assert world.used == (0, 0)


async def use(world: World, handle: str) -> None:
    async with world.store.use([handle]):
        pass


async def fail_using(world: World, handle: str) -> None:
    with suppress(BoomError):
        async with world.store.use([handle]):
            raise BoomError


async def fail_releasing(world: World, handle: str) -> None:
    with suppress(BoomError):
        async with world.store.use([handle], release=True):
            raise BoomError


async def list_it(world: World, handle: str) -> None:
    assert is_there(world, handle)


@pytest.mark.parametrize(("act", "renews"), [(use, True), (fail_using, True), (fail_releasing, True), (list_it, False)])
async def test_use_renews_a_lease(world: World, act: Callable[[World, str], Awaitable[None]], renews: bool) -> None:
    (handle,) = world.put(lease=20)
    for _ in range(3 if renews else 1):
        assert world.after(15) == 0
        await act(world, handle)
    assert world.store.page(0, 1)[0].lease_remaining == pytest.approx(20 if renews else 5)
    assert world.after(19 if renews else 4.5) == 0
    assert world.after(1.5) == 1
    assert world.used == (0, 0)


@pytest.mark.parametrize("release", [False, True])
async def test_a_tensor_in_use_outlives_its_lease(world: World, release: bool) -> None:
    (handle,) = world.put()
    async with world.store.use([handle], release=release) as inputs:
        inputs.arrays[handle][:] = 7
        assert world.after(1000) == 0
        assert world.used == (TENSOR_BYTES, 1)
        assert np.all(inputs.arrays[handle] == 7)
    if release:
        assert world.used == (0, 0)
    else:
        assert world.after(DEFAULT_LEASE - 0.1) == 0
        assert world.after(0.2) == 1


async def test_a_tensor_deleted_in_use_is_accounted_for_until_the_last_use_ends(world: World) -> None:
    (handle,) = world.put()
    async with world.store.use([handle]) as first:
        async with world.store.use([handle, handle]) as second:
            assert world.store.delete([handle, handle]) == 1
            assert world.store.delete([handle]) == 0
            assert not is_there(world, handle)
            assert second.arrays[handle] is first.arrays[handle]
            assert world.used == (TENSOR_BYTES, 1)
        assert world.used == (TENSOR_BYTES, 1)
        with pytest.raises(NotFoundError):
            async with world.store.use([handle]):
                pass
    assert world.used == (0, 0)
    assert world.after(1000) == 0


async def test_released_tensors_are_hidden_while_used_and_gone_after(world: World) -> None:
    handles = world.put(count=2)
    async with world.store.use(handles, release=True) as inputs:
        assert inputs.exclusive
        assert not any(is_there(world, handle) for handle in handles)
        assert world.used == (2 * TENSOR_BYTES, 2)
    assert world.used == (0, 0)


async def test_released_tensors_are_back_after_an_error(world: World) -> None:
    first, second, third = world.put(count=3)
    with suppress(BoomError):
        async with world.store.use([second, first], release=True):
            raise BoomError
    assert [tensor.handle for tensor in world.store.page(0, 10)] == [first, second, third]
    assert world.used == (3 * TENSOR_BYTES, 3)
    async with world.store.use([first, second], release=True) as inputs:
        assert set(inputs.arrays) == {first, second}
    assert world.used == (TENSOR_BYTES, 1)


async def test_released_tensors_that_are_deleted_meanwhile_are_not_back_after_an_error(world: World) -> None:
    handles = world.put(count=2)
    with suppress(BoomError):
        async with world.store.use(handles, release=True):
            assert world.store.delete(handles[:1]) == 1
            assert world.store.delete(handles[:1]) == 0
            raise BoomError
    assert [tensor.handle for tensor in world.store.page(0, 10)] == handles[1:]
    assert world.used == (TENSOR_BYTES, 1)


@pytest.mark.parametrize("release", [False, True])
async def test_an_unknown_handle_among_others_changes_nothing(world: World, release: bool) -> None:
    (handle,) = world.put()
    unknown = pytest.raises(NotFoundError, match="no tensor with the handle 'nowhere'")
    with unknown:
        async with world.store.use([handle, "nowhere"], release=release):
            pass
    async with world.store.use([handle], release=True) as inputs:
        assert inputs.exclusive
    assert world.used == (0, 0)


async def test_nobody_owns_what_somebody_else_uses(world: World) -> None:
    (handle,) = world.put()
    (kept,) = keep_now(world.store, [np.zeros(10)], None, shared=True)
    async with world.store.use([handle]), world.store.use([handle], release=True) as inputs:
        assert not inputs.exclusive
    async with world.store.use([kept], release=True) as inputs:
        assert not inputs.exclusive
    assert world.used == (0, 0)


def test_tensors_that_last_cost_nothing(world: World) -> None:
    """A look for those that expire is not a look at all."""
    world.memory.limit, world.handles.limit = 1 << 40, 1 << 20
    handles = world.put(lease=60, count=1000)
    looks = 0

    def now() -> float:
        nonlocal looks
        looks += 1
        return world.now

    world.store._queue._clock = now
    for _second in range(50):
        world.now += 1
        assert world.store.expire(Turn(100)) == 0
    assert looks == 50
    assert world.after(60) == 100
    assert world.after(0) == 100
    assert world.store.delete(handles) == 800
    assert world.used == (0, 0)


# --- Budgets

ALLOWED_BYTES, ALLOWED_HANDLES = 1000, 5


def receive(world: World, count: int, num_bytes: int) -> None:
    with world.store.receive([TensorSpec(np.dtype(np.uint8), (num_bytes,))] * count, None) as upload:
        finished(world.store.store(upload))


def keep(world: World, count: int, num_bytes: int) -> None:
    keep_now(world.store, [np.zeros(num_bytes, np.uint8)] * count, None, shared=True)


@pytest.mark.parametrize("take", [receive, keep])
@pytest.mark.parametrize(
    ("used", "count", "num_bytes", "message"),
    [
        (0, 1, 1001, "too many bytes of tensor memory: 1001 asked for, 0 in use, 1000 allowed"),
        (0, 2, 501, "too many bytes of tensor memory: 1002 asked for, 0 in use, 1000 allowed"),
        (2, 1, 841, "too many bytes of tensor memory: 841 asked for, 160 in use, 1000 allowed"),
        (0, 6, 0, "too many tensor handles: 6 asked for, 0 in use, 5 allowed"),
        (5, 1, 1, "too many tensor handles: 1 asked for, 5 in use, 5 allowed"),
    ],
)
def test_a_budget_says_what_was_asked_used_and_allowed(
    world: World, take: Callable[[World, int, int], None], used: int, count: int, num_bytes: int, message: str
) -> None:
    handles = world.put(count=used) if used else []
    with pytest.raises(ResourceExhaustedError) as error:
        take(world, count, num_bytes)
    assert error.value.message == message
    assert world.used == (used * TENSOR_BYTES, used)
    assert world.store.delete(handles) == used
    assert world.used == (0, 0)


@pytest.mark.parametrize("take", [receive, keep])
def test_a_budget_can_be_used_up_exactly(world: World, take: Callable[[World, int, int], None]) -> None:
    take(world, ALLOWED_HANDLES, ALLOWED_BYTES // ALLOWED_HANDLES)
    assert world.used == (ALLOWED_BYTES, ALLOWED_HANDLES)
    assert world.after(2 * DEFAULT_LEASE) == ALLOWED_HANDLES
    assert world.used == (0, 0)


def test_an_upload_that_breaks_gives_back_what_it_reserved(world: World) -> None:
    with suppress(BoomError), world.store.receive([SPEC, SPEC], None):
        assert world.used == (2 * TENSOR_BYTES, 2)
        assert len(world.store) == 0
        raise BoomError
    with world.store.receive([SPEC], None):
        pass
    assert world.used == (0, 0)
    assert len(world.store) == 0


def test_memory_that_is_not_there_gives_back_what_was_reserved() -> None:
    class NoMemory(BufferPool):
        def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NoReturn:
            raise MemoryError

    world = World(pool=NoMemory(0))
    with pytest.raises(MemoryError), world.store.receive([SPEC], None) as upload:
        assert upload.arrays
    assert world.used == (0, 0)


# --- The same through the service


@pytest.fixture(scope="module")
def small_server() -> Iterator[LocalServer]:
    limits = LimitsConfig(max_bytes=ByteSize(1_000_000), max_handles=3)
    leases = LeaseConfig(default_lease_seconds=600, max_lease_seconds=700)
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP, limits=limits, leases=leases)) as local:
        yield local


@pytest.fixture
def small_client(small_server: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(small_server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected
        connected.delete(*connected.list_tensors())


def used_by(client: gradserve.Client) -> tuple[float, float]:
    usage = client.server_info().usage
    return usage["num_bytes"], usage["num_handles"]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([[1_000_001]], "too many bytes of tensor memory: 1000001 asked for, 8 in use, 1000000 allowed"),
        ([[999_993]], "too many bytes of tensor memory: 999993 asked for, 8 in use, 1000000 allowed"),
        ([[1 << 40], [1 << 40]], "too many bytes of tensor memory: 2199023255552 asked for, 8 in use, 1000000 allowed"),
        ([[1 << 62]] * 2, "too many bytes of tensor memory: 9223372036854775808 asked for, 8 in use, 1000000 allowed"),
        ([[1]] * 3, "too many tensor handles: 3 asked for, 1 in use, 3 allowed"),
    ],
)
def test_a_header_that_asks_too_much_is_refused_before_any_payload(
    small_server: LocalServer, small_client: gradserve.Client, shapes: list[list[int]], message: str
) -> None:
    small_client.put([1.0])
    before = used_by(small_client)
    header = tensor_messages_pb2.PutTensorsHeader(
        tensors=[tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=shape) for shape in shapes]
    )
    answered = threading.Event()

    def only_a_header() -> Iterator[tensor_messages_pb2.PutTensorsRequest]:
        yield tensor_messages_pb2.PutTensorsRequest(header=header)
        # Neither payload nor end of stream: whatever the server answers, it answers to the header.
        answered.wait(PATIENCE_SECONDS)

    with grpc.insecure_channel(small_server.address) as channel:
        stub = tensor_service_pb2_grpc.TensorServiceStub(channel)
        future = stub.PutTensors.future(only_a_header(), timeout=PATIENCE_SECONDS)
        future.add_done_callback(lambda _: answered.set())
        assert future.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert future.details() == message
    assert used_by(small_client) == before


def test_the_client_learns_what_is_allowed(small_client: gradserve.Client) -> None:
    with pytest.raises(gradserve.ResourceExhaustedError, match="1000008 asked for, 0 in use, 1000000 allowed"):
        small_client.put(np.zeros(125_001))
    handles = small_client.put_all([1.0, 2.0, 3.0])
    with pytest.raises(gradserve.ResourceExhaustedError, match="1 asked for, 3 in use, 3 allowed"):
        small_client.put(4.0)
    assert small_client.delete(*handles) == 3
    assert used_by(small_client) == (0, 0)
    limits = small_client.server_info().limits
    assert (limits["max_bytes"], limits["max_handles"]) == (1_000_000, 3)
    assert (limits["default_lease"], limits["max_lease"]) == (600, 700)


@pytest.mark.parametrize(("lease", "remaining"), [(None, 600), (300.0, 300), (100.5, 100.5), (1e6, 700)])
def test_leases_through_the_service(
    small_server: LocalServer, small_client: gradserve.Client, lease: float | None, remaining: float
) -> None:
    started = time.monotonic()
    small_client.put(1.0, lease=lease)
    with grpc.insecure_channel(small_server.address) as channel:
        stub = tensor_service_pb2_grpc.TensorServiceStub(channel)
        (stored,) = stub.ListTensors(tensor_messages_pb2.ListTensorsRequest()).tensors
    seconds = stored.lease_remaining.ToNanoseconds() / 1e9
    assert remaining - (time.monotonic() - started) <= seconds <= remaining


@pytest.mark.parametrize("lease", [0.0, -1.0])
def test_a_lease_of_nothing_is_refused(small_client: gradserve.Client, lease: float) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="expected a positive lease"):
        small_client.put(1.0, lease=lease)
    assert used_by(small_client) == (0, 0)


def test_expired_tensors_go_by_themselves(small_client: gradserve.Client) -> None:
    handle = small_client.put(np.zeros(10), lease=0.1)
    eventually(lambda: used_by(small_client), lambda used: used == (0, 0))
    with pytest.raises(gradserve.NotFoundError):
        small_client.get(handle)


def test_handles_cannot_be_guessed(client: gradserve.Client) -> None:
    """At least 120 random bits, and nothing but the id of the server's run shared between neighbours."""
    handles = [each.handle for each in client.put_all(range(200))]
    client.delete(*[each for each in client.list_tensors() if each.handle in set(handles)])
    assert len(set(handles)) == len(handles)
    run = client.server_info().incarnation[:8]
    assert {(handle[:8], len(handle)) for handle in handles} == {(run, 40)}
    bits = np.array([[int(bit) for bit in f"{int(handle[8:], 16):0128b}"] for handle in handles])
    share_of_ones = bits.mean(axis=0)
    assert np.sum((share_of_ones > 0.3) & (share_of_ones < 0.7)) >= 120
    agreement = (bits[1:] == bits[:-1]).mean()
    assert 0.45 < agreement < 0.6
    for guess in (handles[0][:-1], handles[0].upper() + "0", "", "*", "%"):
        with pytest.raises(gradserve.NotFoundError):
            client.get(gradserve.TensorHandle(guess, np.dtype(np.int64), ()))
