"""Replies whose payload is made while it is being sent."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from gradserve.wire.tensors import Serializable


@dataclass(frozen=True)
class StreamedReply:
    """A reply to a call with `streams_results`, whose payload is still being made.

    Attributes:
        message: The message.
        num_bytes: The length of the payload.
        pieces: The payload; a piece is valid until the next is asked for. One of the call's endings closes it.
    """

    message: Serializable
    num_bytes: int
    pieces: AsyncIterator[memoryview]
