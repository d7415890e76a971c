"""The naive server: a thread pool, a lock and a condition."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from benchmarks.peers.driver import Setup, run_server
from benchmarks.peers.naive.service import OPTIONS, SERVICE


class Accumulator:
    """A running sum of float32 gradients."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sum: np.ndarray[Any, np.dtype[np.float32]] | None = None
        self._count = 0

    def apply(self, request: BytesValue, context: grpc.ServicerContext) -> Empty:
        gradient = np.frombuffer(request.value, np.float32)
        with self._changed:
            if self._sum is None:
                self._sum = gradient.copy()
            else:
                self._sum += gradient
            self._count += 1
            self._changed.notify_all()
        return Empty()

    def take(self, request: Int64Value, context: grpc.ServicerContext) -> BytesValue:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= request.value)
            assert self._sum is not None
            average = self._sum / np.float32(self._count)
            self._sum, self._count = None, 0
        return BytesValue(value=average.tobytes())


@contextlib.contextmanager
def serve(setup: Setup) -> Iterator[dict[str, Any]]:
    """Runs the server."""
    accumulator = Accumulator()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Apply": grpc.unary_unary_rpc_method_handler(
            accumulator.apply,
            request_deserializer=BytesValue.FromString,
            response_serializer=Empty.SerializeToString,
        ),
        "Take": grpc.unary_unary_rpc_method_handler(
            accumulator.take,
            request_deserializer=Int64Value.FromString,
            response_serializer=BytesValue.SerializeToString,
        ),
    }
    server = grpc.server(ThreadPoolExecutor(), options=OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield {"address": f"127.0.0.1:{port}"}
    server.stop(grace=None).wait()


if __name__ == "__main__":
    run_server(serve)
