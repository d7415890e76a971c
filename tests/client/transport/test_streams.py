"""Streams from a server that does not follow the protos are errors of the server's, and those that end early."""

import asyncio
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.exchange import TimeLimits
from gradserve.transport.aio.transport import response_of
from gradserve.transport.channel import DownloadParts
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from gradserve_testing import LocalServer
from tests.servers.connecting import change_times

HEADER = tensor_messages_pb2.GetTensorsResponse(
    header=tensor_messages_pb2.GetTensorsHeader(
        tensors=[tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2])]
    )
)
CHUNK = memoryview(np.ones(2, np.float32).tobytes())


def download(*parts: tensor_messages_pb2.GetTensorsResponse | memoryview) -> Sequence[np.ndarray]:
    stream = DownloadParts()
    for part in parts:
        stream.add(part)
    return stream.finish()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "the server sent an empty stream"),
        ([CHUNK], "the server sent a chunk before the header"),
        ([HEADER], "the server sent a malformed stream"),
        ([HEADER, CHUNK[:4]], "the server sent a malformed stream"),
        ([HEADER, CHUNK, CHUNK], "the server sent a malformed stream"),
    ],
    ids=["empty", "no header", "no payload", "half a payload", "too much"],
)
def test_malformed_downloads(
    parts: Sequence[tensor_messages_pb2.GetTensorsResponse | memoryview], message: str
) -> None:
    with pytest.raises(gradserve.InternalError, match=message):
        download(*parts)


def test_a_download() -> None:
    (array,) = download(HEADER, CHUNK[:4], CHUNK[4:])
    np.testing.assert_array_equal(array, np.ones(2, np.float32))


class CutShort:
    """A gRPC call that ends with an error, this long before its deadline."""

    def __init__(self, error: BaseException, left: float | None) -> None:
        self._error = error
        self._left = left

    def __await__(self) -> Generator[Any, Any, None]:
        return self._end().__await__()

    async def _end(self) -> None:
        raise self._error

    def time_remaining(self) -> float | None:
        return self._left


def lost(details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details)


@pytest.mark.parametrize("left", [None, 3.0])
async def test_an_upload_whose_status_grpc_has_lost_may_be_tried_again(left: float | None) -> None:
    with pytest.raises(gradserve.UnavailableError, match="gRPC lost the reason"):
        await response_of(CutShort(lost("Internal error from Core"), left))
    with pytest.raises(grpc.aio.AioRpcError):
        await response_of(CutShort(lost("a fault of the server"), left))


@pytest.mark.parametrize("left", [0.0, 0.005])
async def test_an_upload_whose_time_was_over_may_have_lost_its_status_too(left: float) -> None:
    with pytest.raises(gradserve.DeadlineExceededError):
        await response_of(CutShort(lost("Internal error from Core"), left))


async def test_uploads_whose_time_is_over_end_with_that_error(server: LocalServer) -> None:
    """gRPC cancels those that it is sending. A program that is not cancelled must not see that."""
    array = np.zeros(200_000, np.float32)
    limits = itertools.cycle([0.001, 0.003, 0.01, 0.03])
    async with gradserve.aio.connect(server.address, transport="grpc") as client:
        for limit in itertools.islice(limits, 12):
            change_times(client, TimeLimits(limit, reply=0.01, slowest_bytes_per_second=1e12))
            ended = await asyncio.gather(*[client.put(array) for _ in range(16)], return_exceptions=True)
            assert {type(each) for each in ended} <= {gradserve.TensorHandle, gradserve.DeadlineExceededError}
