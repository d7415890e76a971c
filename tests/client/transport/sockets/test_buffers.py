"""Buffers are sent and filled completely, in order, however little each system call moves."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gradserve_protocol.frames import Buffers

PIECES = st.lists(st.binary(max_size=40), max_size=8)


@given(PIECES, st.lists(st.integers(1, 60), min_size=1), st.none() | st.integers(1, 50))
def test_everything_passes_once_and_in_order(pieces: list[bytes], steps: list[int], limit: int | None) -> None:
    buffers = Buffers(pieces)
    passed = b""
    turn = 0
    while buffers:
        offered = b"".join(buffers.next(limit))
        assert limit is None or len(offered) <= limit
        moved = min(steps[turn % len(steps)], len(offered))
        passed += offered[:moved]
        buffers.advance(moved)
        turn += 1
    assert passed == b"".join(pieces)


def test_a_system_call_gets_no_more_buffers_than_it_takes() -> None:
    buffers = Buffers([b"x"] * 3000)
    counts = []
    while buffers:
        counts.append(len(buffers.next()))
        buffers.advance(counts[-1])
    assert counts == [1024, 1024, 952]


def test_filling_writes_to_the_memory_itself() -> None:
    memory = bytearray(6)
    buffers = Buffers([memoryview(memory)[:2], memoryview(memory)[2:]])
    offered: list[Any] = buffers.next(5)
    offered[0][:], offered[1][:] = b"ab", b"cde"
    buffers.advance(5)
    (rest,) = buffers.next(5)
    memoryview(rest)[:] = b"f"
    assert memory == b"abcdef"
