"""An asyncio server that drops received bytes and sends zeros."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import grpc

from benchmarks.peers.ceiling.wire import OPTIONS, SERVICE, chunks
from benchmarks.peers.driver import Setup, run_server


async def put(requests: AsyncIterator[bytes], context: Any) -> bytes:
    """Counts the bytes."""
    num_bytes = 0
    async for chunk in requests:
        num_bytes += len(chunk)
    return b"%d" % num_bytes


async def get(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """Sends as many bytes as the request asks for."""
    for chunk in chunks(int(request)):
        yield chunk


async def _run(started: Future[int]) -> None:
    server = grpc.aio.server(options=OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Put": grpc.stream_unary_rpc_method_handler(put),
        "Get": grpc.unary_stream_rpc_method_handler(get),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    started.set_result(port)
    await server.wait_for_termination()


@contextlib.contextmanager
def serve(setup: Setup) -> Iterator[dict[str, Any]]:
    """Runs the server's event loop in a thread; the process ends when the parent says so."""
    started: Future[int] = Future()
    threading.Thread(target=asyncio.run, args=[_run(started)], daemon=True).start()
    yield {"address": f"127.0.0.1:{started.result(timeout=30)}"}


if __name__ == "__main__":
    run_server(serve)
