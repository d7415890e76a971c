"""What arrives on a connection is taken once and in order, however it is cut."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradserve.transport.sockets.conversation import Inbox
from gradserve_protocol.frames import FrameError

BYTES = bytes(range(256)) * 400


@given(st.lists(st.tuples(st.integers(1, 60_000), st.integers(0, 40_000)), max_size=20))
def test_everything_is_taken_once_and_in_order(turns: list[tuple[int, int]]) -> None:
    inbox, arrived, taken = Inbox(takes_descriptors=False), 0, b""
    for most, wanted in turns:
        if not inbox.num_bytes:
            step = inbox.more(1)
            part = BYTES[arrived : arrived + min(most, len(step.memory))]
            step.memory[: len(part)] = part
            inbox.add(len(part))
            arrived += len(part)
        taken += bytes(inbox.take(wanted))
        assert inbox.num_bytes == arrived - len(taken)
    assert taken + bytes(inbox.take(inbox.num_bytes)) == BYTES[:arrived]


def test_the_rest_of_a_header_comes_after_its_beginning() -> None:
    inbox = Inbox(takes_descriptors=False)
    inbox.more(32).memory[:40] = BYTES[:40]
    inbox.add(40)
    inbox.take(30)
    step = inbox.more(32)
    assert step.at_least == 22
    step.memory[:22] = BYTES[40:62]
    inbox.add(22)
    assert inbox.take(32) == BYTES[30:62]
    assert inbox.is_empty
    inbox.check_rest()


def test_it_fills_buffers_and_returns_the_rest() -> None:
    inbox = Inbox(takes_descriptors=False)
    inbox.more(1).memory[:10] = BYTES[:10]
    inbox.add(10)
    memory = memoryview(bytearray(16))
    (half, whole) = inbox.fill([memory[:4], memory[4:12], memory[12:]])
    half[:], whole[:] = b"ab", b"cdef"
    assert memory == BYTES[:10] + b"abcdef"


def test_descriptors_that_nobody_takes_are_closed() -> None:
    inbox = Inbox(takes_descriptors=True)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    received = inbox.more(1).descriptors
    assert received is not None
    received.append(descriptor)
    with pytest.raises(FrameError, match="nothing after a REPLY"):
        inbox.check_rest()
    inbox.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert inbox.take_descriptors() == []
