"""The codecs that read bytes of others without a server. The first byte of an input chooses one."""

import contextlib
import random
from collections.abc import Callable
from typing import Self

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from gradserve_protocol.arrays import Assembly, PayloadError
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.frames import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    FrameError,
    FrameHeader,
    FrameKind,
    pack_segments,
    unpack_segments,
)
from gradserve_protocol.tensors import PartDecoder, cut, encode_part
from gradserve_protocol.v1 import tensor_messages_pb2
from tests.fuzz.mutations import mutated_bytes
from tests.fuzz.targets.target import Found

_Request = tensor_messages_pb2.PutTensorsRequest
_decode_part = PartDecoder(_Request.FromString)


def _header(data: bytes) -> None:
    padded = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    header = FrameHeader.unpack(padded)
    if header.pack() != padded:
        raise Found(f"{header} is not what it was read from")


def _segments(data: bytes) -> None:
    num_segments = len(data) // SEGMENT_BYTES
    header = FrameHeader(FrameKind.CALL, payload_bytes=len(data) * 7, size=num_segments)
    segments = unpack_segments(memoryview(data[: num_segments * SEGMENT_BYTES]), header)
    if num_segments and pack_segments(segments) != data[: num_segments * SEGMENT_BYTES]:
        raise Found(f"{segments} are not what they were read from")


def _part(data: bytes) -> None:
    part = _decode_part(data)
    expected = _Request.FromString(data)
    if isinstance(part, memoryview):
        if bytes(part) != expected.chunk:
            raise Found("a chunk is other bytes than protobuf reads")
        for chunk in cut([part]):
            if _Request.FromString(encode_part(chunk)) != _Request(chunk=bytes(part)):
                raise Found("a chunk is not what it was written as")
    elif part != expected:
        raise Found("a part is another message than protobuf reads")


def _assembly(data: bytes) -> None:
    arrays = [np.empty(size, np.uint8) for size in data[:8]]
    assembly = Assembly(arrays)
    assembly.write(memoryview(data[8:]))
    assembly.finish()
    if b"".join(each.tobytes() for each in arrays) != data[8:]:
        raise Found("arrays are other bytes than were written")


_CODECS: tuple[Callable[[bytes], None], ...] = (_header, _segments, _part, _assembly)
_EXPECTED: tuple[type[Exception], ...] = (FrameError, DecodeError, PayloadError, GradserveError)


class Codecs:
    """Reads bytes."""

    def __init__(self) -> None:
        parts = [_Request(chunk=bytes(range(9))), _Request(header=tensor_messages_pb2.PutTensorsHeader())]
        self.corpus = [
            b"\0" + FrameHeader(FrameKind.CALL, name_bytes=3, message_bytes=4, payload_bytes=5, size=1).pack(),
            b"\1" + bytes(64),
            *(b"\2" + part.SerializeToString() for part in parts),
            b"\3" + bytes([1, 2, 0, 0, 0, 0, 0, 0]) + b"abc",
            b"\2" + Duration(seconds=1).SerializeToString(),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None

    def mutated(self, data: bytes, chance: random.Random) -> bytes:
        return bytes([data[0] % len(_CODECS) if data else 0]) + mutated_bytes(data[1:], chance)

    def run(self, data: bytes) -> None:
        if data:
            with contextlib.suppress(*_EXPECTED):
                _CODECS[data[0] % len(_CODECS)](data[1:])

    def check(self) -> None:
        """Nothing is left behind."""
