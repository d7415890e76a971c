"""Writes and reads the payload of streams."""

from collections.abc import Iterator

import numpy as np

from gradserve.calls.exchange import Progress, Upload
from gradserve_protocol.arrays import Array, Assembly, PayloadError, buffer_of
from gradserve_protocol.errors import InternalError
from gradserve_protocol.tensors import Chunk, cut, to_dtype
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2


class UploadParts:
    """The messages of a PutTensors stream, for gRPC, which takes one after the other."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def __iter__(self) -> Iterator[messages_pb2.PutTensorsRequest | Chunk]:
        """Yields the messages."""
        yield messages_pb2.PutTensorsRequest(header=self._upload.header)
        progress = self._upload.progress
        if progress is not None:
            progress.begin()
        for chunk in cut(map(buffer_of, self._upload.arrays)):
            yield chunk
            if progress is not None:
                progress.moved(chunk.num_bytes)  # now gRPC wants the next one


class DownloadParts:
    """Reads the messages of a GetTensors stream into arrays."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._arrays: list[Array] = []
        self._progress = progress
        if progress is not None:
            progress.begin()
        self._assembly: Assembly | None = None

    def add(self, part: messages_pb2.GetTensorsResponse | memoryview) -> None:
        """Adds the next message.

        Raises:
            InternalError: It does not follow the protos.
        """
        try:
            if isinstance(part, memoryview):
                if self._assembly is None:
                    raise InternalError("the server sent a chunk before the header")
                self._assembly.write(part)
                if self._progress is not None:
                    self._progress.moved(len(part))
            else:
                self._arrays = [np.empty(tuple(spec.shape), to_dtype(spec.dtype)) for spec in part.header.tensors]
                self._assembly = Assembly(self._arrays)
        except (PayloadError, ValueError) as error:
            raise InternalError(f"the server sent a malformed stream: {error}") from None

    def finish(self) -> list[Array]:
        """Returns the arrays.

        Raises:
            InternalError: Something is missing.
        """
        if self._assembly is None:
            raise InternalError("the server sent an empty stream")
        try:
            self._assembly.finish()
        except PayloadError as error:
            raise InternalError(f"the server sent a malformed stream: {error}") from None
        return self._arrays
