"""Streams from a server that does not follow the protos are errors of the server's, and those that end early."""

from collections.abc import Sequence

import grpc
import numpy as np
import pytest

import gradserve
from gradserve.transport.aio.transport import response_of
from gradserve.transport.channel import DownloadParts
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2

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


async def test_an_upload_whose_status_grpc_has_lost_may_be_tried_again() -> None:
    async def upload(details: str) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details)

    with pytest.raises(gradserve.UnavailableError, match="gRPC lost the reason"):
        await response_of(upload("Internal error from Core"))
    with pytest.raises(grpc.aio.AioRpcError):
        await response_of(upload("a fault of the server"))
