"""The server's threads share one heap, so that memory which one has freed serves all of them."""

import platform
import subprocess
import sys

import pytest

_COUNT_HEAPS = """
import ctypes
import sys
import threading

from gradserve_server.runtime.process import keep_freed_memory

if sys.argv[1] == "shared":
    keep_freed_memory()
num_threads = 4
all_there = threading.Barrier(num_threads)


def allocate():
    memory = bytearray(1 << 16)
    all_there.wait()
    return memory


threads = [threading.Thread(target=allocate) for _ in range(num_threads)]
for each in threads:
    each.start()
for each in threads:
    each.join()
libc = ctypes.CDLL("libc.so.6")
libc.fdopen.restype = ctypes.c_void_p
libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
output = libc.fdopen(1, b"w")
libc.malloc_info(0, output)
libc.fflush(output)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc")
@pytest.mark.parametrize(("way", "is_shared"), [("shared", True), ("as it comes", False)])
def test_the_number_of_heaps(way: str, is_shared: bool) -> None:
    command = [sys.executable, "-c", _COUNT_HEAPS, way]
    heaps = subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("<heap nr=")
    assert heaps >= 1
    assert (heaps == 1) is is_shared
