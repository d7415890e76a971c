"""Both ends of a conversation in memory: what a client sends, and the bytes it gets."""

from typing import TypeVar

from gradserve.transport.sockets.conversation import Conversation, Receive, Send

T = TypeVar("T")


class EndOfBytesError(Exception):
    """The client wants more than there is."""


def carry_out(conversation: Conversation[T], replies: bytes) -> tuple[T, bytes, int]:
    """Returns the result of a conversation, what it sent, and how many bytes of the replies it took.

    Raises:
        EndOfBytesError: The replies end too early.
    """
    sent, taken = b"", 0
    try:
        while True:
            match next(conversation):
                case Send(buffers):
                    sent += b"".join(buffers)
                case Receive(buffers):
                    for buffer in buffers:
                        part = replies[taken : taken + len(buffer)]
                        if len(part) < len(buffer):
                            raise EndOfBytesError
                        buffer[:] = part
                        taken += len(part)
    except StopIteration as stop:
        return stop.value, sent, taken
    finally:
        conversation.close()
