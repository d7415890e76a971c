"""Ends processes of tests, whether they still run or have ended by themselves."""

import contextlib
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import psutil

from tests.servers.polling import PATIENCE_SECONDS, eventually

Started = TypeVar("Started", bound="subprocess.Popen[Any] | BaseProcess | psutil.Process")


def end_process(process: "subprocess.Popen[Any] | BaseProcess | psutil.Process") -> None:
    """Kills a process, which may have ended by itself. Returns when it is gone, a child's pipes are closed."""
    if isinstance(process, psutil.Process):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        eventually(lambda: has_ended(process))
    elif isinstance(process, BaseProcess):
        process.kill()
        process.join(PATIENCE_SECONDS)
        process.close()
    else:
        process.kill()
        process.wait(PATIENCE_SECONDS)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # something for it was still in the buffer
                    pipe.close()


@contextlib.contextmanager
def ended(process: Started) -> Iterator[Started]:
    """Ends a process at the end of the block, however that ends."""
    try:
        yield process
    finally:
        end_process(process)


def has_ended(process: psutil.Process) -> bool:
    """True if a process is gone, or is one that its parent, which may be anybody, has not yet reaped.

    Its first thread may have ended long before others, which keep its sockets open.
    """
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True
