"""Bytes in segments: allocated, written, read again, and used again."""

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradserve_server.storage.directory import StateError
from gradserve_server.storage.segments import Extent, Segments, whole_blocks

SEGMENT = 1 << 16
BLOCK = 4096


def content(number: int, size: int) -> bytes:
    return bytes(itertools.islice(itertools.cycle([number % 251, number // 251 % 251, 7]), size))


@given(st.lists(st.one_of(st.integers(0, 3 * SEGMENT), st.just(-1)), max_size=20))
def test_values_keep_their_bytes_while_others_come_and_go(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    segments = Segments(tmp_path_factory.mktemp("segments") / "s", SEGMENT)
    values: dict[int, tuple[list[Extent], int]] = {}
    for number, size in enumerate(sizes):
        if size < 0:
            if values:
                extents, _ = values.pop(min(values))
                segments.release(extents)
            continue
        extents = segments.allocate(size)
        segments.write(extents, [memoryview(content(number, size))])
        values[number] = extents, size
    used = sum(whole_blocks(size) for _, size in values.values())
    assert segments.num_bytes == segments.num_free + used
    segments.flush()
    for number, (extents, size) in values.items():
        memory = bytearray(size)
        segments.read(extents, memoryview(memory))
        assert memory == content(number, size)
    free = segments.num_free
    segments.close()
    again = Segments(segments.path(1).parent, SEGMENT)
    assert again.occupy({number: extents for number, (extents, _) in values.items()}) == {}
    assert again.num_free == free
    again.close()


def test_space_is_used_again(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "s", SEGMENT)
    for _ in range(100):
        segments.release(segments.allocate(SEGMENT // 2))
    assert segments.num_bytes == SEGMENT
    segments.close()


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    segments = Segments(tmp_path / "s", SEGMENT)
    segments.allocate(BLOCK)
    monkeypatch.setattr(os, "posix_fallocate", full)
    free = segments.num_free
    with pytest.raises(OSError, match="No space left"):
        segments.allocate(SEGMENT)
    assert segments.num_free == free
    assert os.listdir(tmp_path / "s") == ["000001.segment"]
    segments.close()


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ([Extent(1, 0, BLOCK), Extent(1, 0, BLOCK)], "two values are in the same place, at 0"),
        ([Extent(1, 0, 2 * BLOCK), Extent(1, BLOCK, BLOCK)], "two values are in the same place, at 4096"),
        ([Extent(1, SEGMENT, BLOCK)], f"expected {SEGMENT + BLOCK} bytes or more, got {SEGMENT}"),
        ([Extent(2, 0, BLOCK)], "000002.segment: the file is missing"),
    ],
)
def test_extents_that_cannot_be(tmp_path: Path, extents: list[Extent], message: str) -> None:
    segments = Segments(tmp_path / "s", SEGMENT)
    segments.allocate(1)
    segments.close()
    again = Segments(tmp_path / "s", SEGMENT)
    faults = again.occupy(dict(enumerate([[each] for each in extents])))
    assert [number for number, fault in faults.items() if message in fault] == [len(extents) - 1]
    assert len(faults) == 1
    assert again.num_free == SEGMENT - sum(each.num_bytes for each in extents[:-1])
    again.close()


def test_a_file_that_is_no_segment(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "notes.txt").write_text("")
    with pytest.raises(StateError, match=r"notes.txt: expected nothing but segments"):
        Segments(tmp_path / "s", SEGMENT)


def test_a_segment_that_was_cut_off(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "s", SEGMENT)
    extents = segments.allocate(SEGMENT)
    os.truncate(segments.path(1), BLOCK)
    with pytest.raises(StateError, match="000001.segment: the file ends at 4096, within a value"):
        segments.read(extents, memoryview(bytearray(SEGMENT)))
    segments.close()
