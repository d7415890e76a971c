"""What callers give up leaves nothing behind, and callers that wait cost next to nothing."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import gradserve.aio
from gradserve.testing import ServerProcess
from gradserve_protocol.v1 import (
    accumulator_messages_pb2,
    accumulator_pb2,
    accumulator_service_pb2_grpc,
    tensor_messages_pb2,
    tensor_pb2,
    tensor_service_pb2_grpc,
)
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually_async
from tests.servers.runtime import NOT_WARMED_UP

_MIB = 1 << 20
_UPLOAD_BYTES = 4 * _MIB


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    # With an arena for each thread, what is resident goes up and down by megabytes, as it falls to another one.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    # All of a test's calls come over one connection.
    with ServerProcess(tmp_path, "--warm-up", "false", "--max-connection-calls", "1024") as running:
        yield running


@pytest.fixture
async def client(process: ServerProcess) -> AsyncIterator[gradserve.aio.Client]:
    async with gradserve.aio.connect(process.address) as connected:
        yield connected


@pytest.fixture
async def channel(process: ServerProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(process.address) as opened:
        yield opened


async def usage(client: gradserve.aio.Client) -> dict[str, float]:
    """Returns what is in use, accumulators aside."""
    used = (await client.server_info()).usage
    return {name: used[name] for name in ("num_bytes", "num_handles", "num_waiters")}


async def until_waiting(client: gradserve.aio.Client, count: int) -> None:
    async def waiting() -> float:
        return (await usage(client))["num_waiters"]

    await eventually_async(waiting, lambda waiters: waiters == count)


async def until_unused(client: gradserve.aio.Client) -> None:
    await eventually_async(lambda: usage(client), lambda used: not any(used.values()))


async def cancel_all(calls: list[Any]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.timing  # how much an allocator keeps depends on how threads meet
async def test_cancelled_takes(process: ServerProcess, client: gradserve.aio.Client, channel: grpc.aio.Channel) -> None:
    """Every take comes from a client that was never seen before and never comes back."""
    acc = await client.conditional_accumulator("float32", ())
    stub = accumulator_service_pb2_grpc.AccumulatorServiceStub(channel)

    async def give_up(count: int) -> None:
        batch = 250
        for _ in range(count // batch):
            takes = [
                stub.TakeGradient(
                    accumulator_messages_pb2.TakeGradientRequest(
                        accumulator=accumulator_pb2.AccumulatorRef(name=acc.name),
                        request_id=accumulator_pb2.RequestId(client_id=uuid.uuid4().hex, sequence=1),
                        num_required=1,
                    )
                )
                for _ in range(batch)
            ]
            await until_waiting(client, batch)
            await cancel_all(takes)
            await until_waiting(client, 0)

    await give_up(3_000)  # Buffers and caches find their sizes.
    before = process.resident_bytes
    await give_up(6_000)
    assert process.resident_bytes - before < 6 * _MIB, f"{before} bytes before"
    assert (await acc.info()).num_waiting == 0
    assert await usage(client) == {"num_bytes": 0, "num_handles": 0, "num_waiters": 0}
    await acc.apply_grad(1)
    assert await acc.take_grad(1) == 1


async def break_upload(stub: Any, kind: str, all_under_way: asyncio.Event) -> None:
    """Begins an upload and does not complete it."""
    call = stub.PutTensors()
    header = tensor_messages_pb2.PutTensorsHeader(
        tensors=[tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[_UPLOAD_BYTES])]
    )
    await call.write(tensor_messages_pb2.PutTensorsRequest(header=header))
    if kind != "header only":
        await call.write(tensor_messages_pb2.PutTensorsRequest(chunk=bytes(_UPLOAD_BYTES // 64)))
    await all_under_way.wait()
    if kind == "too few bytes":
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"expected a payload of {_UPLOAD_BYTES} bytes" in str(error.value.details())
    else:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


@pytest.mark.timing  # as above
@pytest.mark.parametrize("kind", ["half-way", "header only", "too few bytes"])
async def test_broken_uploads(
    process: ServerProcess, client: gradserve.aio.Client, channel: grpc.aio.Channel, kind: str
) -> None:
    stub = tensor_service_pb2_grpc.TensorServiceStub(channel)

    async def break_off(count: int) -> None:
        batch = 20
        for _ in range(count // batch):
            all_under_way = asyncio.Event()
            async with asyncio.TaskGroup() as uploads:
                for _ in range(batch):
                    uploads.create_task(break_upload(stub, kind, all_under_way))
                under_way = await eventually_async(lambda: usage(client), lambda used: used["num_handles"] == batch)
                assert under_way["num_bytes"] == batch * _UPLOAD_BYTES
                all_under_way.set()
            await until_unused(client)

    await break_off(600)  # The pool of buffers keeps what it was once given.
    before = process.resident_bytes
    await break_off(600)
    assert process.resident_bytes - before < 8 * _MIB, f"{before} bytes before"
    handle = await client.put(np.arange(3))
    assert (await client.get(handle)).tolist() == [0, 1, 2]


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["half-way", "header only", "too few bytes"])
async def test_broken_uploads_give_their_memory_back_at_once(kind: str, no_garbage_collector: None) -> None:
    """Not when the garbage collector comes, which takes no notice of how much memory an object has."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        async with (
            gradserve.aio.connect(server.address) as client,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            stub = tensor_service_pb2_grpc.TensorServiceStub(channel)
            for _ in range(5):
                all_under_way = asyncio.Event()
                upload = asyncio.create_task(break_upload(stub, kind, all_under_way))
                await eventually_async(lambda: usage(client), lambda used: used["num_handles"] == 1)
                all_under_way.set()
                await upload
                await until_unused(client)

                async def idle_bytes() -> int:
                    return server.inspect(lambda inside: inside.store._pool.idle_bytes)

                await eventually_async(idle_bytes, lambda idle: idle == _UPLOAD_BYTES)


@pytest.mark.parametrize("release", [False, True])
async def test_broken_downloads(client: gradserve.aio.Client, channel: grpc.aio.Channel, release: bool) -> None:
    """A stream that breaks deletes nothing, and does not hold the tensor for ever."""
    stub = tensor_service_pb2_grpc.TensorServiceStub(channel)
    handle = await client.put(np.zeros(32 * _MIB, np.uint8))
    for _ in range(20):
        call = stub.GetTensors(tensor_messages_pb2.GetTensorsRequest(handles=[handle.handle], release=release))
        assert (await call.read()).HasField("header")
        call.cancel()

        async def found() -> list[gradserve.TensorHandle]:
            return await client.list_tensors()

        await eventually_async(found)
    assert await client.delete(handle) == 1
    await until_unused(client)


NUM_BLOCKED = 1_000


@pytest.mark.parametrize("end", ["cancelled", "satisfied", "deleted"])
async def test_thousands_of_blocked_takes(
    process: ServerProcess, client: gradserve.aio.Client, channel: grpc.aio.Channel, end: str
) -> None:
    acc = await client.conditional_accumulator("float32", ())
    other = await client.conditional_accumulator("float32", (2,))
    stub = accumulator_service_pb2_grpc.AccumulatorServiceStub(channel)
    threads_before = process.num_threads
    request = accumulator_messages_pb2.TakeGradientRequest(
        accumulator=accumulator_pb2.AccumulatorRef(name=acc.name), num_required=1
    )
    takes = [stub.TakeGradient(request) for _ in range(NUM_BLOCKED)]
    await until_waiting(client, NUM_BLOCKED)
    assert (await acc.info()).num_waiting == NUM_BLOCKED

    assert process.num_threads - threads_before < 10
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await other.apply_grad([1, 2])).num_accumulated == 1
    assert (await other.take_grad(1, timeout=PATIENCE_SECONDS)).tolist() == [1, 2]
    handle = await client.put(np.arange(100_000))
    assert (await client.get(handle, release=True)).tolist() == list(range(100_000))
    assert (await client.server_info()).usage["num_waiters"] == NUM_BLOCKED

    if end == "cancelled":
        await cancel_all(takes)
    elif end == "satisfied":
        for value in range(NUM_BLOCKED):
            await acc.apply_grad(value, local_step=value)
        replies = await asyncio.gather(*takes)
        steps = [reply.average.step for reply in replies]
        values = [np.frombuffer(reply.average.components[0].dense.content, np.float32)[0] for reply in replies]
        assert sorted(steps) == list(range(1, NUM_BLOCKED + 1))
        assert values == [step - 1 for step in steps]
    else:
        assert await acc.delete()
        failures = await asyncio.gather(*takes, return_exceptions=True)
        assert {failure.code() for failure in failures if isinstance(failure, grpc.aio.AioRpcError)} == {
            grpc.StatusCode.ABORTED
        }
    await until_waiting(client, 0)
    if end != "deleted":
        assert (await acc.info()).num_waiting == 0
