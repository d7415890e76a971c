"""The steps of a conversation on a socket, which a transport carries out."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from gradserve.calls.progress import Progress

T = TypeVar("T")


class Send(NamedTuple):
    """Sends buffers, one after the other. Answered by None.

    Attributes:
        buffers: The buffers.
        descriptor: A descriptor to send with the first byte.
        on_strands: What to send on strands at the same time.
        progress: Told how many bytes were sent.
    """

    buffers: Sequence[bytes | memoryview]
    descriptor: int | None = None
    on_strands: Sequence[Sequence[bytes | memoryview]] = ()
    progress: Progress | None = None


class Receive(NamedTuple):
    """Receives what comes, for which the server may have to work first. Answered by the number of bytes.

    Attributes:
        memory: Where to put it.
        at_least: The number of bytes to wait for.
        descriptors: Gets the descriptors that come with the bytes; None if none may come.
    """

    memory: memoryview
    at_least: int
    descriptors: list[int] | None = None


class Fill(NamedTuple):
    """Fills buffers with the rest of a frame, one after the other. Answered by None.

    Attributes:
        buffers: The buffers.
        payload_bytes: The size of the payload that begins here, for which there is more time.
        on_strands: The buffers to fill from strands at the same time.
        progress: Told how many bytes were received.
    """

    buffers: Sequence[memoryview]
    payload_bytes: int = 0
    on_strands: Sequence[Sequence[memoryview]] = ()
    progress: Progress | None = None


Step: TypeAlias = Send | Receive | Fill
Conversation: TypeAlias = Generator[Step, Any, T]
