"""Tensors travel to the server and back, whatever they are made of and however they are cut."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve_protocol.arrays import Array
from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.config import LeaseConfig, ServerConfig
from gradserve_server.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.memory import Memory
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.tensors.spec import TensorSpec
from gradserve_server.tensors.store import TensorStore
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP
from tests.tensors.keeping import finished, keep_now

DTYPES = [
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float32),
    np.dtype(np.float64),
    *(np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)),
    np.dtype(np.bool_),
    np.dtype(np.complex64),
    np.dtype(np.complex128),
]
BIG_BYTES = 5 << 20


class Awaited:
    """Lets the blocking client be called as the asyncio one, so that every test is for both."""

    def __init__(self, client: gradserve.Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def method(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._client, name)(*args, **kwargs)

        return method


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """A server of this file alone, as its use is measured."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local:
        yield local


@pytest.fixture(scope="module")
def server_address(server: LocalServer) -> str:
    return server.address


@pytest.fixture(params=["blocking", "aio"])
async def face(request: pytest.FixtureRequest, server_address: str) -> AsyncIterator[Any]:
    if request.param == "blocking":
        with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client:
            yield Awaited(client)
    else:
        async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as client:
            yield client


@pytest.fixture
def raw(server_address: str) -> Iterator[RawCalls]:
    with RawCalls(server_address) as calls:
        yield calls


def noise(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> Array:
    """Returns an array of any bits at all: NaNs with a payload, denormals, infinities."""
    count = int(np.prod(shape, dtype=int))
    generator = np.random.default_rng(seed)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(bool)
    return np.frombuffer(generator.bytes(count * dtype.itemsize), dtype).reshape(shape)


def bits(array: Any) -> tuple[np.dtype[Any], tuple[int, ...], bytes]:
    """Returns all there is to an array: two of them are equal when it is, NaNs included."""
    native = np.asarray(array)
    native = native.astype(native.dtype.newbyteorder("<"))
    return native.dtype, native.shape, native.tobytes()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_dtype_and_shape(face: Any, dtype: np.dtype[Any]) -> None:
    shapes = [(), (0,), (0, 3), (3, 0, 2), (1,), (7, 5), (2, 3, 4, 5), (1,) * 20, (BIG_BYTES // dtype.itemsize,)]
    for shape in shapes:
        array = noise(shape, dtype)
        handle = await face.put(array)
        assert (handle.dtype, handle.shape) == (dtype, shape)
        got = await face.get(handle, release=True)
        assert bits(got) == bits(array)
        assert got.flags.writeable
        assert got.flags.c_contiguous


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(lambda array: array[::2, 1::3], id="strided"),
        pytest.param(lambda array: array[::-1], id="backwards"),
        pytest.param(lambda array: array.T, id="transposed"),
        pytest.param(np.asfortranarray, id="fortran"),
        pytest.param(lambda array: np.broadcast_to(array[:1], (9, array.shape[1])), id="broadcast"),
        pytest.param(lambda array: array[:, :0], id="empty part"),
        pytest.param(lambda array: array[3:4, 2:3], id="one element"),
        pytest.param(lambda array: array[0, 0], id="numpy scalar"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "complex128", "bfloat16", "bool", ">f4", ">i8", ">c8", ">u2", "<i4", "="])
async def test_every_memory_layout(face: Any, arrange: Callable[[Array], Array], dtype: str) -> None:
    given = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float64 if dtype == "=" else dtype)
    array = arrange(noise((12, 15), given))
    handle = await face.put(array)
    assert bits(await face.get(handle)) == bits(array)
    await face.delete(handle)


@pytest.mark.parametrize("order", ["<", ">"])
async def test_values_do_not_depend_on_the_byte_order(face: Any, order: str) -> None:
    got = await face.get(await face.put(np.arange(5, dtype=f"{order}i4")), release=True)
    assert got.dtype == np.dtype("<i4")
    assert got.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [3, 2.5, True, 1j, [1, 2], [[1.0], [2.0]], [], ((1, 2), (3, 4)), np.longlong(4)])
async def test_whatever_becomes_an_array(face: Any, value: Any) -> None:
    got = await face.get(await face.put(value), release=True)
    assert bits(got) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(np.zeros(2, "M8[s]"), id="dates"),
        pytest.param(np.zeros(2, np.longdouble), id="long double"),
        pytest.param(np.zeros(2, "i4,f8"), id="records"),
        pytest.param(np.zeros(2, ml_dtypes.float8_e5m2), id="float8"),
    ],
)
async def test_what_no_tensor_can_hold(face: Any, value: Any) -> None:
    expected = r"expected a dtype out of float16, bfloat16, .* for value, got "
    with pytest.raises(gradserve.InvalidArgumentError, match=expected):
        await face.put(value)


@pytest.mark.parametrize("count", [1, 2, 161, 2000])
async def test_many_tensors_in_one_stream(face: Any, count: int) -> None:
    arrays = [noise((index % 7, 3), DTYPES[index % len(DTYPES)], index) for index in range(count)]
    handles = await face.put_all(arrays)
    assert len({handle.handle for handle in handles}) == count
    assert [bits(array) for array in await face.get_all(handles)] == [bits(array) for array in arrays]
    mixed = handles[::-1]
    assert [bits(array) for array in await face.get_all(mixed)] == [bits(array) for array in arrays[::-1]]
    assert await face.delete(*handles) == count


async def test_big_and_small_in_one_stream(face: Any) -> None:
    arrays = [
        noise((), np.dtype(np.float64)),
        noise((BIG_BYTES,), np.dtype(np.uint8)),
        noise((0,), np.dtype(np.int16)),
        noise((1_000_003,), np.dtype(np.uint16), 1),
        noise((1,), np.dtype(np.int8)),
    ]
    got = await face.get_all(await face.put_all(arrays), release=True)
    assert [bits(array) for array in got] == [bits(array) for array in arrays]


async def test_only_empty_tensors(face: Any) -> None:
    arrays = [np.empty((0, 4), np.float32), np.empty((0,), np.bool_)]
    got = await face.get_all(await face.put_all(arrays), release=True)
    assert [bits(array) for array in got] == [bits(array) for array in arrays]


async def test_none_at_all(face: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="at least one tensor, got none") as raised:
        await face.put_all([])
    assert raised.value.field in ("tensors", "header.tensors")  # on a socket, in a stream
    with pytest.raises(gradserve.InvalidArgumentError, match="at least one handle, got none") as raised:
        await face.get_all([])
    assert raised.value.field == "handles"
    assert await face.delete() == 0


async def test_get_leaves_the_tensor_and_release_deletes_it(face: Any) -> None:
    handle = await face.put([1, 2])
    first = await face.get(handle)
    first[:] = 9
    assert (await face.get(handle)).tolist() == [1, 2]
    assert [array.tolist() for array in await face.get_all([handle, handle])] == [[1, 2], [1, 2]]
    released = await face.get_all([handle, handle], release=True)
    assert [array.tolist() for array in released] == [[1, 2], [1, 2]]
    with pytest.raises(gradserve.NotFoundError):
        await face.get(handle)


async def test_what_is_put_is_a_copy(face: Any) -> None:
    array = np.ones(100_000)
    handle = await face.put(array)
    array[:] = 2
    assert (await face.get(handle, release=True) == 1).all()


async def test_an_unknown_handle(face: Any) -> None:
    handle = await face.put([1.0])
    assert await face.delete(handle) == 1
    assert await face.delete(handle) == 0
    with pytest.raises(gradserve.NotFoundError, match=f"no tensor with the handle '{handle.handle}'"):
        await face.get(handle)
    with pytest.raises(KeyError):
        await face.get(handle, release=True)


async def test_one_unknown_handle_releases_none(face: Any) -> None:
    kept, gone = await face.put_all([[1], [2]])
    await face.delete(gone)
    with pytest.raises(gradserve.NotFoundError):
        await face.get_all([kept, gone], release=True)
    assert (await face.get(kept, release=True)).tolist() == [1]


async def test_delete_counts_each_once(face: Any) -> None:
    one, two = await face.put_all([[1], [2]])
    assert await face.delete(one, one, two) == 2


async def test_list_is_in_the_order_of_storing(face: Any) -> None:
    before = {each.handle for each in await face.list_tensors()}
    handles = [await face.put(noise((index, 2), DTYPES[index])) for index in range(5)]
    handles += await face.put_all([[1.0], [True], 1j])
    listed = [each for each in await face.list_tensors() if each.handle not in before]
    assert listed == handles
    await face.delete(handles[0], handles[3])
    listed = [each for each in await face.list_tensors() if each.handle not in before]
    assert listed == [*handles[1:3], *handles[4:]]
    await face.delete(*handles)


async def test_list_goes_beyond_a_page(face: Any) -> None:
    before = {each.handle for each in await face.list_tensors()}
    handles = await face.put_all(list(range(1203)))
    assert [each for each in await face.list_tensors() if each.handle not in before] == handles
    await face.delete(*handles)


async def test_the_memory_comes_back(face: Any, server: LocalServer) -> None:
    before = (await face.server_info()).usage
    handles = await face.put_all([np.ones((2, 300), np.float32), np.ones(7, np.int8)])
    during = (await face.server_info()).usage
    assert during["num_bytes"] - before["num_bytes"] == 2407
    assert during["num_handles"] - before["num_handles"] == 2
    await face.delete(*handles)
    assert (await face.server_info()).usage == before


async def test_many_at_once(server_address: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as client:

        async def there_and_back(seed: int) -> bool:
            array = noise((seed * 10_007 % 400_000,), np.dtype(np.uint8), seed)
            return bits(await client.get(await client.put(array), release=True)) == bits(array)

        assert all(await asyncio.gather(*(there_and_back(seed) for seed in range(24))))


def header_of(arrays: Sequence[Array], **fields: Any) -> messages_pb2.PutTensorsRequest:
    specs = [tensor_pb2.TensorSpec(dtype=to_data_type(array.dtype), shape=array.shape) for array in arrays]
    return messages_pb2.PutTensorsRequest(header=messages_pb2.PutTensorsHeader(tensors=specs, **fields))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([1], id="bytes"),
        pytest.param([3, 5, 7], id="odd"),
        pytest.param([0, 11, 0, 0], id="with empty chunks"),
        pytest.param([1000], id="one chunk"),
        pytest.param([31, 1, 8], id="at and around the boundaries"),
    ],
)
def test_generated_classes_with_chunks_cut_anywhere(raw: RawCalls, sizes: list[int]) -> None:
    arrays = [
        noise((4,), np.dtype(np.float64)),
        noise((0, 2), np.dtype(np.int32)),
        noise((), np.dtype(np.complex128)),
        noise((3, 5), np.dtype(np.int16)),
    ]
    payload = b"".join(array.tobytes() for array in arrays)
    chunks = []
    cycle = itertools.cycle(sizes)
    while payload:
        size = next(cycle)
        chunks.append(messages_pb2.PutTensorsRequest(chunk=payload[:size]))
        payload = payload[size:]
    stored = raw.call("PutTensors", header_of(arrays), *chunks)
    assert [(to_data_type(array.dtype), list(array.shape)) for array in arrays] == [
        (tensor.dtype, list(tensor.shape)) for tensor in stored.tensors
    ]

    handles = [tensor.handle for tensor in stored.tensors]
    first, *rest = raw.call("GetTensors", messages_pb2.GetTensorsRequest(handles=handles, release=True))
    assert first.header.tensors == header_of(arrays).header.tensors
    assert {part.WhichOneof("part") for part in rest} == {"chunk"}
    assert b"".join(part.chunk for part in rest) == b"".join(array.tobytes() for array in arrays)


def test_chunks_have_a_mebibyte(raw: RawCalls, client: gradserve.Client) -> None:
    handle = client.put(np.zeros(5 << 19, np.uint8))
    request = messages_pb2.GetTensorsRequest(handles=[handle.handle], release=True)
    _, *chunks = raw.call("GetTensors", request)
    assert [len(part.chunk) for part in chunks] == [1 << 20, 1 << 20, 1 << 19]


def test_a_broken_off_read_releases_nothing(raw: RawCalls, client: gradserve.Client, server: LocalServer) -> None:
    before = client.server_info().usage
    handle = client.put(np.zeros(32 << 20, np.uint8))
    request = messages_pb2.GetTensorsRequest(handles=[handle.handle], release=True)
    stream = raw.start("GetTensors", request)
    assert messages_pb2.GetTensorsResponse.FromString(next(stream)).HasField("header")
    stream.cancel()
    eventually(client.list_tensors, lambda listed: handle in listed)
    assert client.get(handle).size == 32 << 20
    # Nobody holds on to it: deleting it gives everything back.
    assert client.delete(handle) == 1
    assert client.server_info().usage == before


def test_deleting_what_is_being_read(raw: RawCalls, client: gradserve.Client) -> None:
    before = client.server_info().usage
    array = noise((32 << 20,), np.dtype(np.uint8))
    handle = client.put(array)
    stream = raw.start("GetTensors", messages_pb2.GetTensorsRequest(handles=[handle.handle]))
    next(stream)
    assert client.delete(handle) == 1
    assert client.server_info().usage["num_bytes"] == before["num_bytes"] + array.nbytes
    received = b"".join(messages_pb2.GetTensorsResponse.FromString(part).chunk for part in stream)
    assert received == array.tobytes()
    eventually(lambda: client.server_info().usage, before.__eq__)


def test_leases(raw: RawCalls) -> None:
    leases = LeaseConfig(default_lease_seconds=500, max_lease_seconds=1000)
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP, leases=leases)) as local,
        gradserve.connect(local.address) as client,
    ):
        client.put(1)
        client.put(2, lease=100)
        client.put(3, lease=1e6)
        client.put(4, lease=0.5)
        with RawCalls(local.address) as calls:
            listed = calls.call("ListTensors", messages_pb2.ListTensorsRequest()).tensors
        remaining = [each.lease_remaining.ToNanoseconds() / 1e9 for each in listed]
        for seconds, lease in zip(remaining, [500, 100, 1000, 0.5], strict=False):
            assert lease - 60 < seconds <= lease
        limits = client.server_info().limits
        assert (limits["default_lease"], limits["max_lease"]) == (500, 1000)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> TensorStore:
    numbers = itertools.count(1)
    return TensorStore(
        pool=BufferPool(0),
        memory=Memory(Budget(1000, "bytes of tensor memory")),
        handles=Budget(10, "tensor handles"),
        leases=LeaseConfig(default_lease_seconds=10, max_lease_seconds=100),
        clock=clock,
        new_handle=lambda: f"h{next(numbers)}",
    )


def put(store: TensorStore, num_bytes: int = 8, lease: float | None = None) -> str:
    with store.receive([TensorSpec(np.dtype(np.uint8), (num_bytes,))], lease) as upload:
        (handle,) = finished(store.store(upload))
    return handle


def remaining(store: TensorStore) -> dict[str, float]:
    return {each.handle: each.lease_remaining for each in store.page(0, 100)}


async def test_a_lease_ends(store: TensorStore, clock: Clock) -> None:
    put(store)
    put(store, lease=20)
    put(store, lease=1e9)
    assert remaining(store) == {"h1": 10, "h2": 20, "h3": 100}
    clock.now += 9.5
    assert store.expire(Turn(100)) == 0
    assert remaining(store) == {"h1": 0.5, "h2": 10.5, "h3": 90.5}
    clock.now += 0.5
    assert store.expire(Turn(100)) == 1
    assert remaining(store) == {"h2": 10, "h3": 90}
    with pytest.raises(NotFoundError):
        async with store.use(["h1"]):
            pass
    clock.now += 1000
    assert store.expire(Turn(100)) == 2
    assert len(store) == 0


async def test_use_renews_a_lease_and_holds_the_tensor(store: TensorStore, clock: Clock) -> None:
    handle = put(store)
    clock.now += 9
    async with store.use([handle, handle]) as inputs:
        clock.now += 100
        assert store.expire(Turn(100)) == 0
        assert inputs.arrays[handle].shape == (8,)
    assert remaining(store) == {handle: 10}
    clock.now += 9
    with contextlib.suppress(RuntimeError):
        async with store.use([handle], release=True):
            assert remaining(store) == {}
            raise RuntimeError
    assert remaining(store) == {handle: 10}
    async with store.use([handle], release=True):
        pass
    assert remaining(store) == {}


def test_lists_do_not_renew(store: TensorStore, clock: Clock) -> None:
    put(store)
    clock.now += 4
    assert remaining(store) == remaining(store) == {"h1": 6}


@pytest.mark.parametrize("lease", [0, -1, float("-inf")])
def test_a_lease_must_be_positive(store: TensorStore, lease: float) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a positive lease"):
        put(store, lease=lease)
    with pytest.raises(InvalidArgumentError, match="expected a positive lease"):
        keep_now(store, [np.zeros(3)], lease, shared=True)
    assert len(store) == 0


def test_what_does_not_fit_leaves_nothing_behind(store: TensorStore) -> None:
    for _ in range(3):
        with pytest.raises(ResourceExhaustedError, match="1001 asked for, 0 in use, 1000 allowed"):
            put(store, 1001)
        with pytest.raises(ResourceExhaustedError, match="11 asked for, 0 in use, 10 allowed"):
            keep_now(store, [np.zeros(1)] * 11, None, shared=True)
    with pytest.raises(RuntimeError), store.receive([TensorSpec(np.dtype(np.uint8), (1000,))], None):
        raise RuntimeError
    put(store, 1000)
    with pytest.raises(ResourceExhaustedError, match="8 asked for, 1000 in use, 1000 allowed"):
        keep_now(store, [np.zeros(1)], None, shared=True)
    store.delete(["h1"])
    put(store, 1000)
