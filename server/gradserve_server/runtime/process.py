"""The process of a command: its signals, its end, and its limits, also those of its container.

Imported before modules that take time to import, so it imports next to nothing.
"""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)


_NUMBERS = (signal.SIGTERM, signal.SIGINT)

_ONE_STOP_SECONDS = 0.5
"""Seconds in which further signals count as the same stop. `timeout`, process managers and terminals signal a process
and then its group; the server has this time to finish."""

_OVERTIME_SECONDS = 1.0
"""Seconds after the drain time, in which clients learn that their calls were ended."""


class StopSignals:
    """Ends this process on SIGTERM or SIGINT: with status 0 and in time, or at once on a second signal.

    Python runs signal handlers only when the main thread gets to them, not while that loads a library, looks up a host
    or computes. So the signals are blocked in all threads, and a dedicated thread waits for them.
    """

    def __init__(self) -> None:
        """Starts waiting. Until `drain_with`, a signal ends the process at once, because it has nothing to lose.

        Call this in the main thread before it starts others: threads and child processes inherit the blocked signals.
        """
        self._lock = threading.Lock()
        self._drain: tuple[Callable[[], object], float] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._wait, name="gradserve-signals", daemon=True).start()

    def drain_with(self, begin: Callable[[], object], seconds: float) -> None:
        """Sets how signals end the process from now on.

        Args:
            begin: Makes the main thread drain and end the process, without waiting for it; called in another thread.
            seconds: The drain time, soon after which the process ends anyway.
        """
        with self._lock:
            self._drain = begin, seconds

    def _wait(self) -> None:
        signal.sigwait(_NUMBERS)
        first = time.monotonic()
        with self._lock:
            if self._drain is None:
                os._exit(0)
            begin, seconds = self._drain
        with suppress(RuntimeError):  # the event loop is closed, so the process is ending
            begin()
        second = signal.sigtimedwait(_NUMBERS, seconds + _OVERTIME_SECONDS)
        if second is None:
            os._exit(0)
        time.sleep(max(0.0, first + _ONE_STOP_SECONDS - time.monotonic()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        os.kill(os.getpid(), second.si_signo)
        os._exit(128 + second.si_signo)  # no default signal action ends the first process of a container


_SWITCH_SECONDS = 0.0005


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Keeps the collector of garbage off what the block imports: modules stay as long as the process.

    It would look at them 260 times while a server begins, which is a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def end_process() -> None:
    """Ends this process with status 0 after its event loop has ended, without waiting for threads.

    A kernel that is being compiled cannot be interrupted, and takes many seconds on a busy machine. The interpreter
    would wait for its thread; or, with a daemon thread, run LLVM's destructors while it compiles. Everything that must
    outlive the process is done: streams have ended, files are removed, and the log is flushed here. Without such a
    thread this function returns, and the process ends as usual.
    """
    if all(thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def allow_many_descriptors() -> None:
    """Raises the limit of open descriptors to its maximum: each connection and each shared region takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def silence_grpc() -> None:
    """Keeps gRPC from writing to the terminal besides the log, unless GRPC_VERBOSITY asks for it.

    Call it before gRPC is imported, which then reads the variable.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def switch_threads_often() -> None:
    """Lets the event loop go on soon while other threads run Python.

    A thread keeps the interpreter for 5 ms unless this is called, and a small call needs it several times: while a
    request of very many parts was read in a thread, health checks took 10 ms instead of 2.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEEP_BYTES = 1 << 30
_TOP_PAD_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed memory rather than return it.

    Every 1 MiB message of a stream is an allocation, which glibc would map, fault in page by page and unmap again.
    Reuse makes streams nearly twice as fast. All threads share one heap: each of several would keep what it was once
    given, and glibc makes up to eight for each core. Only for processes of our own, because it changes the whole
    process. Without glibc it has no effect.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        _log.info("no glibc: its allocator cannot be tuned")
        return
    mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
    mallopt(_M_ARENA_MAX, 1)


_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns the memory that this process can use."""
    import psutil

    total: int = psutil.virtual_memory().total
    limit = _first_word(cgroup / "memory.max")
    return min(total, int(limit)) if limit.isdecimal() else total


def num_cores(cgroup: Path = _CGROUP) -> int:
    """Returns the number of threads of this process that can run at once, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota, *period = _read(cgroup / "cpu.max").split() or [""]
    if quota.isdecimal() and period and int(period[0]):
        cores = min(cores, int(quota) // int(period[0]))
    return max(cores, 1)


def _first_word(path: Path) -> str:
    return next(iter(_read(path).split()), "")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not in a container, or an older kernel
