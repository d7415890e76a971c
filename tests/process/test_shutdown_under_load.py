"""A server that is stopped while clients call: each call is answered or UNAVAILABLE, and says why."""

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

import gradserve
import gradserve.aio
from gradserve.testing import ServerProcess
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as layer_messages_pb2
from gradserve_protocol.v1 import (
    batch_norm_layer_pb2,
    fused_batch_norm_messages_pb2,
    server_messages_pb2,
    tensor_messages_pb2,
    tensor_pb2,
)
from tests.bad_input.requests import Apply, PushPull, Read, Take, dense, ref, tensor, zeros
from tests.servers.polling import eventually_async
from tests.servers.raw_calls import METHODS

Way: TypeAlias = Literal["grpc", "bulk", "shared_memory"]

_LOOPS_OF_EACH_KIND = 4
_CALLS_BEFORE_STOP = 10
_UPLOAD_BYTES = 1 << 16


def upload_messages() -> Iterator[bytes]:
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[_UPLOAD_BYTES])
    header = tensor_messages_pb2.PutTensorsHeader(tensors=[spec], lease={"seconds": 1})
    for message in (
        tensor_messages_pb2.PutTensorsRequest(header=header),
        tensor_messages_pb2.PutTensorsRequest(chunk=bytes(_UPLOAD_BYTES)),
    ):
        yield message.SerializeToString()


async def make_requests(address: str) -> dict[str, Message]:
    """Returns a request of each method that a busy client calls, after making what it calls them on."""
    async with gradserve.aio.connect(address, transport="grpc") as client:
        acc = await client.conditional_accumulator("float32", (), "w")
        await acc.apply_grad(1)
        await acc.take_grad(1)
        layer = await client.batch_norm(scope="layer")
        await layer(np.zeros((2, 3), np.float32))
        stored = await client.put(np.zeros(1 << 16), lease=3600)
    channels, none = zeros(3), zeros(0)
    return {
        "ApplyGradient": Apply(accumulator=ref("w"), local_step=1 << 40, gradient=[dense(tensor(1.0))]),
        "PushPull": PushPull(accumulator=ref("w"), local_step=1 << 40, gradient=[dense(tensor(1.0))], num_required=1),
        "TakeGradient": Take(accumulator=ref("w"), num_required=_LOOPS_OF_EACH_KIND),
        "ReadAverage": Read(accumulator=ref("w")),
        "GetServerInfo": server_messages_pb2.GetServerInfoRequest(),
        "ListTensors": tensor_messages_pb2.ListTensorsRequest(page_size=1),
        "PutTensors": tensor_messages_pb2.PutTensorsRequest(),
        "GetTensors": tensor_messages_pb2.GetTensorsRequest(handles=[stored.handle]),
        "FusedBatchNorm": fused_batch_norm_messages_pb2.FusedBatchNormRequest(
            x=zeros(1, 2, 2, 3), scale=channels, offset=channels, mean=none, variance=none
        ),
        "BatchNormForward": layer_messages_pb2.BatchNormForwardRequest(
            layer=batch_norm_layer_pb2.BatchNormLayerRef(name="layer"), inputs=zeros(2, 3)
        ),
    }


class Loop:
    """A client of its own that calls one method again and again, each time when it has the last answer."""

    def __init__(self, address: str, method: str, request: Message) -> None:
        self.method = method
        self.answered = 0
        self._address = address
        self._request = request.SerializeToString()

    async def run(self) -> tuple[str, str]:
        """Returns the status that ended it, and what was said."""
        options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            try:
                while True:
                    await self._call(channel)
                    self.answered += 1
            except grpc.aio.AioRpcError as error:
                return error.code().name, error.details() or ""

    async def _call(self, channel: grpc.aio.Channel) -> None:
        descriptor = METHODS[self.method]
        path = f"/{descriptor.containing_service.full_name}/{self.method}"
        if descriptor.client_streaming:
            upload: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(path)
            await upload(upload_messages())
        elif descriptor.server_streaming:
            download: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
            async for _ in download(self._request):
                pass
        else:
            unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            await unary(self._request)


async def test_no_call_of_a_busy_server_is_cancelled(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as process:
        requests = await make_requests(process.address)
        loops = [
            Loop(process.address, method, request)
            for (method, request), _ in itertools.product(requests.items(), range(_LOOPS_OF_EACH_KIND))
        ]
        running = [asyncio.create_task(loop.run()) for loop in loops]

        async def least_answered() -> int:
            assert not any(task.done() for task in running)
            return min(loop.answered for loop in loops)

        await eventually_async(least_answered, lambda calls: calls >= _CALLS_BEFORE_STOP)
        process.signal(signal.SIGTERM)
        ends = await asyncio.gather(*running)
        assert await asyncio.to_thread(process.wait) == 0
        assert Counter(status for status, _ in ends) == {"UNAVAILABLE": len(loops)}, dict(zip(loops, ends, strict=True))
        assert {said.partition(";")[0] for _, said in ends} == {"the server is shutting down"}
        assert "Traceback" not in process.log


class ClientLoops:
    """Clients that apply gradients again and again, blocking and with asyncio, until a call fails."""

    def __init__(self, address: str, way: Way) -> None:
        self._address = address
        self._way: Way = way
        self.answered: Counter[str] = Counter()

    def run_blocking(self, name: str) -> gradserve.GradserveError:
        """Returns the error that ended it."""
        client = gradserve.connect(self._address, transport=self._way)
        acc = client.conditional_accumulator("float32", (), "w")
        try:
            while True:
                acc.apply_grad(1, local_step=1 << 40)
                self.answered[name] += 1
        except gradserve.GradserveError as error:
            return error

    async def run(self, name: str) -> gradserve.GradserveError:
        """Returns the error that ended it."""
        client = gradserve.aio.connect(self._address, transport=self._way)
        acc = await client.conditional_accumulator("float32", (), "w")
        try:
            while True:
                await acc.apply_grad(1, local_step=1 << 40)
                self.answered[name] += 1
        except gradserve.GradserveError as error:
            return error


@pytest.mark.parametrize("way", get_args(Way))
async def test_clients_learn_why_their_calls_failed(tmp_path: Path, way: Way) -> None:
    """They try some more times, and say what the server said, not only that nobody answers any more."""
    with ServerProcess(tmp_path, "--warm-up", "false") as process:
        loops = ClientLoops(process.address, way)
        running = [asyncio.create_task(loops.run(f"asyncio {number}")) for number in range(_LOOPS_OF_EACH_KIND)]
        running += [
            asyncio.create_task(asyncio.to_thread(loops.run_blocking, f"blocking {number}"))
            for number in range(_LOOPS_OF_EACH_KIND)
        ]

        async def least_answered() -> int:
            assert not any(task.done() for task in running)
            return min(loops.answered.values()) if len(loops.answered) == len(running) else 0

        await eventually_async(least_answered, lambda calls: calls >= _CALLS_BEFORE_STOP)
        process.signal(signal.SIGTERM)
        for error in await asyncio.gather(*running):
            assert type(error) is gradserve.UnavailableError
            assert str(error).startswith("the server is shutting down")
            assert error.request_id is not None
