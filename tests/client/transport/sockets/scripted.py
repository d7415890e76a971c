"""Both ends of a conversation in memory: what a client sends, and the bytes it gets."""

from typing import TypeVar

from gradserve.transport.sockets.conversation import Conversation, Fill, Receive, Send

T = TypeVar("T")


class EndOfBytesError(Exception):
    """The client wants more than there is."""


def carry_out(conversation: Conversation[T], replies: bytes, in_one_go: int = 1 << 20) -> tuple[T, bytes, int]:
    """Returns the result of a conversation, what it sent, and how many bytes of the replies it took.

    Args:
        conversation: The conversation.
        replies: What the server sends.
        in_one_go: How many bytes arrive at a time.

    Raises:
        EndOfBytesError: The replies end too early.
    """
    sent, taken = b"", 0
    try:
        step = next(conversation)
        while True:
            answer = None
            match step:
                case Send(buffers):
                    sent += b"".join(buffers)
                case Receive(memory, at_least):
                    part = replies[taken : taken + min(max(at_least, in_one_go), len(memory))]
                    if len(part) < at_least:
                        raise EndOfBytesError
                    memory[: len(part)] = part
                    taken += len(part)
                    answer = len(part)
                case Fill(buffers):
                    for buffer in buffers:
                        part = replies[taken : taken + len(buffer)]
                        if len(part) < len(buffer):
                            raise EndOfBytesError
                        buffer[:] = part
                        taken += len(part)
            step = conversation.send(answer)
    except StopIteration as stop:
        return stop.value, sent, taken
    finally:
        conversation.close()
