"""Frames as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradserve_protocol.frames import (
    ALIGNMENT,
    HEADER_BYTES,
    MAX_NAME_BYTES,
    MAX_SEGMENTS,
    SEGMENT_BYTES,
    FrameError,
    FrameHeader,
    FrameKind,
    Segment,
    pack_segments,
    unpack_segments,
)

U64 = st.integers(0, (1 << 64) - 1)


@given(
    st.sampled_from(FrameKind),
    st.integers(0, 255),
    st.integers(0, MAX_NAME_BYTES),
    st.integers(0, (1 << 32) - 1),
    U64,
    U64,
    st.integers(0, MAX_SEGMENTS),
)
def test_headers_come_back(
    kind: FrameKind, code: int, name: int, message: int, payload: int, number: int, size: int
) -> None:
    header = FrameHeader(kind, code, name, message, payload, number, size)
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert FrameHeader.unpack(data) == header
    has_segments = kind in (FrameKind.CALL, FrameKind.REPLY)
    assert header.head_bytes == name + message + (size * SEGMENT_BYTES if has_segments else 0)
    assert header.has_more == (name + message + payload > 0)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_refused(data: bytes) -> None:
    try:
        header = FrameHeader.unpack(data)
    except FrameError:
        return
    assert header.pack() == data


REFUSED_HEADERS = {
    "kind 0": (FrameHeader(FrameKind.CALL).pack()[1:].join([b"\0", b""]), "expected a known kind of frame, got 0"),
    "kind 8": (b"\10" + FrameHeader(FrameKind.CALL).pack()[1:], "expected a known kind of frame, got 8"),
    "name": (FrameHeader(FrameKind.CALL, name_bytes=1025).pack(), "a name of at most 1024 bytes, got 1025"),
    "segments": (
        FrameHeader(FrameKind.CALL, size=MAX_SEGMENTS + 1).pack(),
        f"at most {MAX_SEGMENTS} segments, got {MAX_SEGMENTS + 1}",
    ),
    "segments of a reply": (FrameHeader(FrameKind.REPLY, size=1 << 63).pack(), f"at most {MAX_SEGMENTS} segments"),
}


@pytest.mark.parametrize(("data", "message"), list(REFUSED_HEADERS.values()), ids=list(REFUSED_HEADERS))
def test_headers_that_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        FrameHeader.unpack(data)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200), st.integers(0, 3)), max_size=20))
def test_segments_come_back(parts: list[tuple[int, int, int]]) -> None:
    segments, end, end_in_frame = [], 0, 0
    for gap, num_bytes, region in parts:
        start = -(-end // ALIGNMENT + -gap) * ALIGNMENT if gap else -(-end // ALIGNMENT) * ALIGNMENT
        place = gap * ALIGNMENT if region else -(-end_in_frame // ALIGNMENT) * ALIGNMENT
        segments.append(Segment(start, num_bytes, region, place))
        end = start + num_bytes
        if not region:
            end_in_frame = place + num_bytes
    header = FrameHeader(FrameKind.CALL, payload_bytes=end_in_frame, size=len(segments))
    data = memoryview(pack_segments(segments))
    if segments:
        assert unpack_segments(data, header) == segments


def test_without_segments_the_payload_follows_the_message() -> None:
    header = FrameHeader(FrameKind.CALL, payload_bytes=7)
    assert unpack_segments(memoryview(b""), header) == [Segment(0, 7, 0, 0)]
    assert unpack_segments(memoryview(b""), FrameHeader(FrameKind.CALL)) == []


REFUSED_SEGMENTS = {
    "out of order": ([Segment(128, 8, 1, 0), Segment(0, 8, 1, 64)], "in order that do not overlap"),
    "overlap": ([Segment(0, 65, 1, 0), Segment(64, 8, 1, 128)], "got one at 64 before 65"),
    "end beyond 2^64": ([Segment(64, (1 << 64) - 1, 1, 0), Segment(128, 1, 1, 0)], "in order"),
    "beyond the frame": ([Segment(0, 257, 0, 0)], "within the 256 bytes of the frame, got one of 257 at 0"),
    "begins beyond the frame": ([Segment(0, 1, 0, 256)], "within the 256 bytes"),
    "beyond 2^64": ([Segment(0, 256, 0, (1 << 64) - 64)], "within the 256 bytes"),
    "same bytes twice": ([Segment(0, 64, 0, 0), Segment(64, 64, 0, 0)], "without overlaps, got one at 0 before 64"),
    "misaligned start": ([Segment(1, 8, 1, 0)], "at multiples of 64, got one at 1"),
    "misaligned place": ([Segment(0, 8, 1, 8)], "at multiples of 64, got one at 0 that begins at 8"),
    "misaligned in the frame": ([Segment(0, 8, 0, 4)], "at multiples of 64"),
}


@pytest.mark.parametrize(("segments", "message"), list(REFUSED_SEGMENTS.values()), ids=list(REFUSED_SEGMENTS))
def test_segments_that_are_refused(segments: list[Segment], message: str) -> None:
    header = FrameHeader(FrameKind.CALL, payload_bytes=256, size=len(segments))
    with pytest.raises(FrameError, match=message):
        unpack_segments(memoryview(pack_segments(segments)), header)
