"""Serializes replies with averages for gRPC: once for all calls that get the same average."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradserve.wire.tensors import Contents, WithContents, encode_message
from gradserve_server.accumulators.gradient import Average
from gradserve_server.rpc.boundary.chain import Codec

_MOST_BYTES = 4 << 20
"""The longest reply that is kept. Clients in Python ask for inline averages of up to 3 MiB."""


@dataclass
class ContentsOfAverage(Contents):
    """The contents of an average.

    Attributes:
        average: The average, whose arrays never change.
    """

    is_kept: ClassVar[bool] = True
    average: Average | None = None


@dataclass(frozen=True)
class _Kept:
    average: "weakref.ref[Average]"
    message: bytes
    reply: bytes


class ReplyEncoder:
    """Serializes replies, and keeps the latest one as long as its average: other calls may be answered in the same way.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __call__(self, reply: WithContents) -> bytes:
        """Returns a reply as it is sent."""
        contents = reply.contents
        if not isinstance(contents, ContentsOfAverage) or contents.average is None or not contents.buffers:
            return encode_message(reply)
        message = reply.message.SerializeToString()
        kept = self._kept
        if kept is not None and kept.average() is contents.average and kept.message == message:
            return kept.reply
        encoded = encode_message(reply)
        if len(encoded) <= _MOST_BYTES:
            self._kept = _Kept(weakref.ref(contents.average, self._forget), message, encoded)
        return encoded

    def _forget(self, average: "weakref.ref[Average]") -> None:
        if self._kept is not None and self._kept.average is average:
            self._kept = None


def reply_codecs() -> Mapping[str, Codec]:
    """Returns the serializers of the methods whose replies several calls may get."""
    return {method: Codec(encode=ReplyEncoder()) for method in ("PushPull", "ReadAverage", "ReduceGradients")}
