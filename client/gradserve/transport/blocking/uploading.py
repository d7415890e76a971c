"""Uploads over gRPC, whose chunks a thread of gRPC's takes.

The calling thread may get an exception from outside at any time, as from the handler of a signal. So gRPC's thread gets
no chunk before the calling one has the future with which it can cancel the call.
"""

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from gradserve.calls.exchange import Upload
from gradserve.calls.progress import Progress
from gradserve.transport.blocking.sockets import Watch
from gradserve.transport.streams import UploadParts
from gradserve.v1 import tensor_messages_pb2 as messages_pb2
from gradserve.wire.frames import Metadata
from gradserve.wire.tensors import Chunk


def carry_upload(upload: Upload, put: Any, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
    """Makes the call with gRPC's `put`; returns its response, or raises gRPC's error."""
    parts = UploadParts(upload)
    may_begin: queue.SimpleQueue[bool] = queue.SimpleQueue()
    future = None

    def messages() -> Iterator[messages_pb2.PutTensorsRequest | Chunk]:
        if may_begin.get():
            yield from parts

    try:
        future = put.future(messages(), timeout=timeout, metadata=metadata)
        if watch is not None:
            watch(future.cancel)
        may_begin.put(True)
        return future.result()
    finally:
        _end(upload, future, is_complete=parts.is_complete)
        may_begin.put(False)


def _end(upload: Upload, future: Any, *, is_complete: bool) -> None:
    """Ends the call of an upload whose thread waits no more: an exception from outside may have ended the wait.

    Args:
        upload: The upload.
        future: gRPC's future of the call; None if the exception came before gRPC had returned it.
        is_complete: Whether gRPC has all of it. The server may have stored it then, so what it says is waited for in
            the background.
    """
    if future is None:
        return
    if not is_complete or upload.unclaimed is None:
        future.cancel()
    elif not future.done():
        future.add_done_callback(partial(_tell, upload.unclaimed))


def _tell(unclaimed: Callable[[messages_pb2.PutTensorsResponse], object], future: Any) -> None:
    if not future.cancelled() and future.exception() is None:
        unclaimed(future.result())


class ReportedUpload:
    """An upload whose progress is told in the calling thread. gRPC's thread waits until that has been done.

    So an upload whose callback raises an exception is incomplete, and the server keeps nothing of it.
    """

    def __init__(self, upload: Upload, progress: Progress) -> None:
        self._upload = upload
        self._progress = progress
        self._chunks = UploadParts(replace(upload, progress=None))
        self._due: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._may_go_on: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(self, put: Any, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
        """Makes the call with gRPC's `put`; returns its response, or raises gRPC's error or that of the callback."""
        future = None
        try:
            future = put.future(self._parts(), timeout=timeout, metadata=metadata)
            future.add_done_callback(lambda _: self._due.put(False))
            self._may_go_on.put(True)
            if watch is not None:
                watch(future.cancel)
            while self._due.get():
                self._progress.tell()
                self._may_go_on.put(True)
            return future.result()
        finally:
            # First: chunks that end without it are a complete upload.
            _end(self._upload, future, is_complete=self._chunks.is_complete)
            self._may_go_on.put(False)

    def _parts(self) -> Iterator[messages_pb2.PutTensorsRequest | Chunk]:
        if not self._may_go_on.get():
            return
        self._progress.begin()
        for part in self._chunks:
            yield part
            if isinstance(part, Chunk) and self._progress.add(part.num_bytes):
                self._due.put(True)
                if not self._may_go_on.get():
                    return
