"""A process that maps memory of another does not own it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from benchmarks.harness.process_memory import own_bytes, resident_bytes, status_bytes

_NUM_BYTES = 32 << 20
_READER = """
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), 0, prot=mmap.PROT_READ)
sum(memory[::4096])
print("read", flush=True)
sys.stdin.read()
"""


def test_memory_belongs_to_the_process_that_writes_it() -> None:
    descriptor = os.memfd_create("region")
    try:
        os.ftruncate(descriptor, _NUM_BYTES)
        with (
            mmap.mmap(descriptor, _NUM_BYTES) as memory,
            subprocess.Popen(
                [sys.executable, "-c", _READER, str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
            ) as reader,
        ):
            memory[:] = bytes(_NUM_BYTES)
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"read\n"
            assert resident_bytes(reader.pid) - own_bytes(reader.pid, [os.getpid()]) == _NUM_BYTES
            assert own_bytes(reader.pid, []) == resident_bytes(reader.pid)
            assert own_bytes(os.getpid(), [reader.pid]) >= _NUM_BYTES
            reader.communicate()
    finally:
        os.close(descriptor)


def test_a_field_that_does_not_exist() -> None:
    with pytest.raises(OSError, match="has no VmNonsense"):
        status_bytes(os.getpid(), "VmNonsense")
