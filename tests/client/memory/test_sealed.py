"""Memory files that two processes map: what is safe to map, and what others can do with them."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gradserve_protocol.memory.sealed import RegionError, Seal, make_region, map_region
from tests.servers.descriptors import num_open

_ADD_SEALS = 1033
_MFD_HUGETLB = 4
_PUNCH_HOLE = 0x02 | 0x01
PAGE = mmap.PAGESIZE


def memory_file(seals: Seal = Seal.SHRINK | Seal.SEAL, num_bytes: int = PAGE) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, _ADD_SEALS, int(seals))
    return descriptor


def opened_again(flags: int) -> int:
    first = memory_file()
    try:
        return os.open(f"/proc/self/fd/{first}", flags)
    finally:
        os.close(first)


def one_end_of_a_pipe(_folder: Path) -> int:
    ours, other = os.pipe()
    os.close(other)
    return ours


def file_in(folder: Path) -> int:
    path = folder / "file"
    path.write_bytes(bytes(PAGE))
    return os.open(path, os.O_RDWR)


def file_in_memory(_folder: Path) -> int:
    with suppress(FileExistsError):
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    raise AssertionError("an unnamed file has no name that exists")


def unsealable(_folder: Path) -> int:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, PAGE)
    return descriptor


def huge_pages(_folder: Path) -> int:
    size = 1 << 21
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | _MFD_HUGETLB)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, _ADD_SEALS, int(Seal.SHRINK | Seal.SEAL))
    except OSError as error:
        os.close(descriptor)
        pytest.skip(f"no huge pages here: {error}")
    return descriptor


REFUSED: dict[str, tuple[Callable[[Path], int], str]] = {
    "pipe": (one_end_of_a_pipe, "another kind of descriptor"),
    "device": (lambda _: os.open("/dev/zero", os.O_RDWR), "another kind of descriptor"),
    "directory": (lambda folder: os.open(folder, os.O_RDONLY), "another kind of descriptor"),
    "event": (lambda _: os.eventfd(0), "another kind of descriptor"),
    "ordinary file": (file_in, "memory file"),
    "file in memory": (file_in_memory, "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
    "without seals": (lambda _: memory_file(Seal(0)), "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
    "never sealed": (unsealable, "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
    "can shrink": (lambda _: memory_file(Seal.SEAL), "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
    "only cannot shrink": (lambda _: memory_file(Seal.SHRINK), "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
    "cannot grow": (lambda _: memory_file(Seal.GROW | Seal.SEAL), "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
    "opened for writing only": (lambda _: opened_again(os.O_WRONLY), "cannot map"),
    "opened as a path": (lambda _: opened_again(os.O_PATH), "another kind of descriptor"),
    "empty": (lambda _: memory_file(num_bytes=0), "at least 4096 bytes, got 0"),
    "too short": (lambda _: memory_file(num_bytes=PAGE - 1), "at least 4096 bytes, got 4095"),
    "huge pages": (huge_pages, "ordinary pages"),
}


@pytest.mark.parametrize(("make", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_is_not_mapped(tmp_path: Path, make: Callable[[Path], int], message: str) -> None:
    descriptor = make(tmp_path)
    try:
        with pytest.raises(RegionError, match=message):
            map_region(descriptor, PAGE)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("num_bytes", [0, -1, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_sizes_that_are_not_mapped(num_bytes: int) -> None:
    descriptor = memory_file()
    try:
        with pytest.raises(RegionError):
            map_region(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def test_a_closed_descriptor_is_none() -> None:
    descriptor = memory_file()
    os.close(descriptor)
    with pytest.raises(RegionError, match="another kind of descriptor"):
        map_region(descriptor, PAGE)


@pytest.mark.parametrize("num_bytes", [-1, 1 << 62, 1 << 64])
def test_a_region_that_cannot_be_made_leaves_no_descriptor(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[os.stat_result] = []
    create = os.memfd_create

    def created(name: str, flags: int) -> int:
        descriptor = create(name, flags)
        made.append(os.fstat(descriptor))
        return descriptor

    monkeypatch.setattr(os, "memfd_create", created)
    with pytest.raises(MemoryError, match=r"cannot make a region of -?\d+ bytes"):
        make_region(num_bytes, read_only_for_others=False)
    assert [num_open(each) for each in made] == [0]


def test_both_sides_see_the_same_bytes_and_one_cannot_write() -> None:
    descriptor, memory = make_region(3 * PAGE, read_only_for_others=False)
    other = map_region(descriptor, 2 * PAGE + 1)
    os.close(descriptor)
    memory[2 * PAGE] = 7
    assert other[2 * PAGE] == 7
    assert len(other) == 2 * PAGE + 1
    with pytest.raises(TypeError):
        other[0] = 1


def test_an_empty_terabyte_costs_nothing() -> None:
    descriptor = memory_file(num_bytes=1 << 40)
    try:
        memory = map_region(descriptor, 1 << 40)
        assert memory[(1 << 40) - 1] == 0
        assert os.fstat(descriptor).st_blocks * 512 <= 2 * PAGE, "only what was read takes memory"
    finally:
        os.close(descriptor)


def write(descriptor: int) -> None:
    os.pwrite(descriptor, b"x", 0)


def map_writable(descriptor: int) -> None:
    mmap.mmap(descriptor, PAGE)


def open_again_and_map(descriptor: int) -> None:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        mmap.mmap(again, PAGE)
    finally:
        os.close(again)


def punch_a_hole(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(PAGE)):
        raise OSError(ctypes.get_errno(), "no hole")


def make_writable_later(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(PAGE), mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ctypes.c_long(0))
    try:
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "not writable")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(PAGE))


SPOIL: dict[str, Callable[[int], object]] = {
    "write": write,
    "map it writable": map_writable,
    "open it again": open_again_and_map,
    "make a map writable": make_writable_later,
    "truncate": lambda descriptor: os.ftruncate(descriptor, 0),
    "grow": lambda descriptor: os.ftruncate(descriptor, 4 * PAGE),
    "punch a hole": punch_a_hole,
    "seal": lambda descriptor: fcntl.fcntl(descriptor, _ADD_SEALS, int(Seal.GROW)),
}


@pytest.fixture
def region() -> Iterator[tuple[int, mmap.mmap]]:
    descriptor, memory = make_region(PAGE, read_only_for_others=True)
    yield descriptor, memory
    os.close(descriptor)


@pytest.mark.parametrize("spoil", list(SPOIL.values()), ids=list(SPOIL))
def test_who_gets_a_read_only_region_cannot_change_it(
    region: tuple[int, mmap.mmap], spoil: Callable[[int], object]
) -> None:
    descriptor, memory = region
    memory[0] = 1
    with pytest.raises(OSError) as error:  # noqa: PT011
        spoil(descriptor)
    assert error.value.errno in (errno.EPERM, errno.EACCES)
    memory[1] = 2
    seen = map_region(descriptor, PAGE)
    assert (seen[0], seen[1]) == (1, 2)
