"""Memory files (memfd) that processes of one machine share, sealed against changes of size."""

import ctypes
import fcntl
import mmap
import os
import stat
from enum import IntFlag
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ADD_SEALS = 1033
_GET_SEALS = 1034
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MAP_FAILED = ctypes.c_void_p(-1).value


class Seal(IntFlag):
    """An operation that is forbidden on a memory file from now on; see fcntl(2)."""

    SEAL = 1
    """Adding seals."""
    SHRINK = 2
    GROW = 4
    FUTURE_WRITE = 16
    """Writing, except through maps that exist already."""


class RegionError(ValueError):
    """A descriptor of something that cannot be mapped safely."""


def make_region(num_bytes: int, *, read_only_for_others: bool) -> tuple[int, mmap.mmap]:
    """Creates a memory file, and maps it for reading and writing.

    Args:
        num_bytes: Its size, at least 1.
        read_only_for_others: Whether other processes can only read it.

    Returns:
        Its descriptor, which the caller closes, and the map.

    Raises:
        MemoryError: There is not enough memory, or there are too many open files.
    """
    try:
        descriptor = os.memfd_create("gradserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
            seals = Seal.SHRINK | Seal.GROW | Seal.SEAL
            if read_only_for_others:
                seals |= Seal.FUTURE_WRITE
            fcntl.fcntl(descriptor, _ADD_SEALS, int(seals))
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot make a region of {num_bytes} bytes: {error}") from error
    return descriptor, memory


def map_region(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Maps a region of another process for reading. The descriptor can be closed afterwards.

    Maps only memory files of ordinary pages that can never shrink: with anything else, the other process could end this
    one with SIGBUS at any time.

    Raises:
        RegionError: The descriptor is of something else, or of a file shorter than `num_bytes`.
    """
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RegionError("expected a memory file, got another kind of descriptor")
        seals = Seal(fcntl.fcntl(descriptor, _GET_SEALS))
        page_bytes = os.fstatvfs(descriptor).f_bsize
    except OSError as error:
        raise RegionError(f"expected a memory file, got another kind of descriptor ({error.strerror})") from None
    if not (Seal.SHRINK in seals and Seal.SEAL in seals):
        raise RegionError("expected a memory file sealed with F_SEAL_SHRINK and F_SEAL_SEAL")
    if page_bytes != mmap.PAGESIZE:
        raise RegionError(f"expected a memory file of ordinary pages, got pages of {page_bytes} bytes")
    if not 0 < num_bytes <= status.st_size:
        raise RegionError(f"expected a memory file of at least {num_bytes} bytes, got {status.st_size}")
    try:
        return mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, OverflowError, ValueError) as error:
        raise RegionError(f"cannot map {num_bytes} bytes: {error}") from None


def make_private(descriptor: int, address: int, num_bytes: int) -> None:
    """Replaces a map of a memory file by a private map at the same address.

    The file, and all other maps of it, keep their present contents. Pages are copied when they are written.

    Args:
        descriptor: The memory file.
        address: The address of the map.
        num_bytes: Its size, a multiple of the page size.

    Raises:
        MemoryError: There is not enough memory; nothing has changed.
    """
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = system.mremap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    system.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    # First at another address: if that fails, the old map is still there.
    made = system.mmap(None, num_bytes, access, mmap.MAP_PRIVATE | _MAP_NORESERVE, descriptor, 0)
    if made == _MAP_FAILED:
        raise _no_private_map(num_bytes)
    if system.mremap(made, num_bytes, num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == _MAP_FAILED:
        error = _no_private_map(num_bytes)
        system.munmap(made, num_bytes)
        raise error


def machine_id() -> str:
    """Returns the id of the running kernel's boot, which all its containers share; empty where there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _no_private_map(num_bytes: int) -> MemoryError:
    return MemoryError(f"cannot make {num_bytes} bytes private: {os.strerror(ctypes.get_errno())}")
