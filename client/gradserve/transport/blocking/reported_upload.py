"""Uploads over gRPC whose progress is told in the calling thread, while a thread of gRPC's takes the chunks."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gradserve.calls.exchange import Upload
from gradserve.calls.progress import Progress
from gradserve.transport.blocking.sockets import Watch
from gradserve.transport.streams import upload_parts
from gradserve.v1 import tensor_messages_pb2 as messages_pb2
from gradserve.wire.chunks import Chunk
from gradserve.wire.metadata import Metadata


class ReportedUpload:
    """The chunks of an upload. Whenever its progress is to be told, gRPC's thread waits until the caller's has done so.

    So an upload whose callback raises an exception is incomplete, and the server keeps nothing of it.
    """

    def __init__(self, upload: Upload, progress: Progress) -> None:
        self._upload = upload
        self._progress = progress
        self._due: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._may_go_on: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(self, put: Any, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
        """Makes the call with gRPC's `put`; returns its response, or raises gRPC's error or that of the callback."""
        future = put.future(self._parts(), timeout=timeout, metadata=metadata)
        future.add_done_callback(lambda _: self._due.put(False))
        try:
            if watch is not None:
                watch(future.cancel)
            while self._due.get():
                self._progress.tell()
                self._may_go_on.put(True)
            return future.result()
        finally:
            future.cancel()  # first: chunks that end without it are a complete upload
            self._may_go_on.put(False)

    def _parts(self) -> Iterator[messages_pb2.PutTensorsRequest | Chunk]:
        self._progress.begin()
        for part in upload_parts(replace(self._upload, progress=None)):
            yield part
            if isinstance(part, Chunk) and self._progress.add(part.num_bytes):
                self._due.put(True)
                if not self._may_go_on.get():
                    return
