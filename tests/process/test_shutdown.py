"""Signals drain the server: waits end at once, streams finish, new calls are refused, the process ends.

None of these servers loads its kernels, which would hold up its end.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
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
    server_messages_pb2,
    server_service_pb2_grpc,
    tensor_messages_pb2,
    tensor_pb2,
    tensor_service_pb2_grpc,
)
from tests.servers.polling import PATIENCE_SECONDS, eventually_async

_DOWNLOAD_BYTES = 64 << 20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_process(folder: Path, *flags: str) -> ServerProcess:
    return ServerProcess(folder, "--warm-up", "false", *flags)


@dataclass
class Raw:
    """The stubs of a server, over a connection that never tries again."""

    address: str
    channel: grpc.aio.Channel

    @property
    def accumulators(self) -> Any:
        return accumulator_service_pb2_grpc.AccumulatorServiceStub(self.channel)

    @property
    def tensors(self) -> Any:
        return tensor_service_pb2_grpc.TensorServiceStub(self.channel)

    @property
    def server(self) -> Any:
        return server_service_pb2_grpc.ServerServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    async def usage(self) -> server_messages_pb2.ServerUsage:
        info: server_messages_pb2.GetServerInfoResponse = await self.server.GetServerInfo(
            server_messages_pb2.GetServerInfoRequest()
        )
        return info.usage


@contextlib.asynccontextmanager
async def raw(address: str) -> AsyncIterator[Raw]:
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_retries", 0),)) as channel:
        yield Raw(address, channel)


class HalfUpload:
    """A stream that has sent its header and one half."""

    def __init__(self, stub: Raw, num_bytes: int = 1 << 20) -> None:
        self.call = stub.tensors.PutTensors()
        self._half = tensor_messages_pb2.PutTensorsRequest(chunk=bytes(num_bytes // 2))
        spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[num_bytes])
        self._header = tensor_messages_pb2.PutTensorsRequest(
            header=tensor_messages_pb2.PutTensorsHeader(tensors=[spec])
        )

    async def begin(self) -> None:
        await self.call.write(self._header)
        await self.call.write(self._half)

    async def finish(self) -> tensor_messages_pb2.PutTensorsResponse:
        await self.call.write(self._half)
        await self.call.done_writing()
        response: tensor_messages_pb2.PutTensorsResponse = await self.call
        return response


async def status_of(call: Awaitable[Any]) -> grpc.StatusCode:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def exit_status(process: ServerProcess, timeout: float) -> int:
    return await asyncio.to_thread(process.wait, timeout)


async def health_becomes(watch: Any, expected: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await watch.read()).status != expected:
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_drain(tmp_path: Path, number: signal.Signals) -> None:
    with server_process(tmp_path, "--drain-seconds", "600") as process:
        async with raw(process.address) as stub, gradserve.aio.connect(process.address) as client:
            acc = await client.conditional_accumulator("float32", (), shared_name="w")
            stored = await client.put(np.ones(_DOWNLOAD_BYTES, np.uint8))
            ref = accumulator_pb2.AccumulatorRef(name=acc.name)
            scalar = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, content=bytes(4))
            gradient = [accumulator_pb2.ComponentGradient(dense=scalar)]
            watch = stub.health.Watch(health_pb2.HealthCheckRequest())
            await health_becomes(watch, SERVING)
            waiting: dict[str, Any] = {
                "take": stub.accumulators.TakeGradient(
                    accumulator_messages_pb2.TakeGradientRequest(accumulator=ref, num_required=5)
                ),
                "second take": stub.accumulators.TakeGradient(
                    accumulator_messages_pb2.TakeGradientRequest(
                        accumulator=ref, num_required=1, request_id={"client_id": "c"}
                    )
                ),
                "read_average": stub.accumulators.ReadAverage(
                    accumulator_messages_pb2.ReadAverageRequest(accumulator=ref, step=1)
                ),
                "push_pull": stub.accumulators.PushPull(
                    accumulator_messages_pb2.PushPullRequest(accumulator=ref, gradient=gradient, num_required=5)
                ),
            }

            async def num_waiters() -> int:
                return (await stub.usage()).num_waiters

            await eventually_async(num_waiters, lambda waiters: waiters == len(waiting))
            upload = HalfUpload(stub)
            await upload.begin()
            download = stub.tensors.GetTensors(tensor_messages_pb2.GetTensorsRequest(handles=[stored.handle]))
            assert (await download.read()).HasField("header")

            async def num_handles() -> int:
                return (await stub.usage()).num_handles

            await eventually_async(num_handles, lambda handles: handles == 2)

            process.signal(number)

            assert {name: await status_of(call) for name, call in waiting.items()} == dict.fromkeys(
                waiting, grpc.StatusCode.UNAVAILABLE
            )
            for call in waiting.values():
                assert "shutting down" in await call.details()
            await health_becomes(watch, NOT_SERVING)
            get = server_messages_pb2.GetServerInfoRequest()
            assert await status_of(stub.server.GetServerInfo(get)) is grpc.StatusCode.UNAVAILABLE
            async with raw(process.address) as newcomer:
                assert await status_of(newcomer.server.GetServerInfo(get)) is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(gradserve.UnavailableError):
                await client.server_info()
            assert process.process.poll() is None, "the streams are still under way"

            put = await upload.finish()
            assert [tensor.handle != "" for tensor in put.tensors] == [True]
            received = 0
            while (part := await download.read()) is not grpc.aio.EOF:
                received += len(part.chunk)
            assert received == _DOWNLOAD_BYTES
            assert await download.code() is grpc.StatusCode.OK
            # Nobody has cancelled the watch of the health.
            assert await exit_status(process, PATIENCE_SECONDS) == 0
            assert "Traceback" not in process.log


async def never_finished_upload(stub: Raw) -> Any:
    upload = HalfUpload(stub)
    await upload.begin()
    return upload.call


async def never_read_download(stub: Raw) -> Any:
    async with gradserve.aio.connect(stub.address) as client:
        stored = await client.put(np.ones(_DOWNLOAD_BYTES, np.uint8))
    call = stub.tensors.GetTensors(tensor_messages_pb2.GetTensorsRequest(handles=[stored.handle]))
    assert (await call.read()).HasField("header")
    return call


@pytest.mark.parametrize("begin", [never_finished_upload, never_read_download])
async def test_drain_time_bounds_a_stream_that_never_finishes(
    tmp_path: Path, begin: Callable[[Raw], Awaitable[Any]]
) -> None:
    with server_process(tmp_path, "--drain-seconds", "1") as process:
        async with raw(process.address) as stub:
            stream = await begin(stub)
            await eventually_async(stub.usage, lambda usage: usage.num_handles == 1)
            started = time.monotonic()
            process.signal(signal.SIGTERM)
            assert await exit_status(process, PATIENCE_SECONDS) == 0
            assert time.monotonic() - started > 0.9
            if begin is never_read_download:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while await stream.read() is not grpc.aio.EOF:
                        pass
            assert await stream.code() is not grpc.StatusCode.OK
            assert "Traceback" not in process.log


async def test_a_second_signal_ends_the_drain(tmp_path: Path) -> None:
    with server_process(tmp_path, "--drain-seconds", "600") as process:
        async with raw(process.address) as stub:
            watch = stub.health.Watch(health_pb2.HealthCheckRequest())
            await health_becomes(watch, SERVING)
            stream = await never_finished_upload(stub)
            await eventually_async(stub.usage, lambda usage: usage.num_handles == 1)
            process.signal(signal.SIGTERM)
            await health_becomes(watch, NOT_SERVING)
            process.signal(signal.SIGTERM)
            assert await exit_status(process, PATIENCE_SECONDS) == -signal.SIGTERM
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    with server_process(tmp_path, "--drain-seconds", "600") as process:
        async with gradserve.aio.connect(process.address) as client:
            await client.server_info()
            process.signal(signal.SIGTERM)
            assert await exit_status(process, PATIENCE_SECONDS) == 0


async def test_waiting_client_gets_unavailable(tmp_path: Path) -> None:
    """A client tries for some seconds; after that its error names the request for another attempt."""
    with server_process(tmp_path) as process:
        async with gradserve.aio.connect(process.address) as client, raw(process.address) as stub:
            acc = await client.conditional_accumulator("float32", (), shared_name="w")
            take = asyncio.create_task(acc.take_grad(1, timeout=600))
            await eventually_async(stub.usage, lambda usage: usage.num_waiters == 1)
            process.signal(signal.SIGTERM)
            with pytest.raises(gradserve.UnavailableError) as error:
                await asyncio.wait_for(take, PATIENCE_SECONDS)
            assert error.value.request_id is not None
