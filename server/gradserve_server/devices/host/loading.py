"""Loads kernels when calls have asked for them: in a thread, from the cache on disk, which another process fills.

A call that finds no kernel computes with NumPy, and leaves a request here. What is not in the cache is compiled by a
process of low priority: compiling is mostly Python, which would keep the calls of this process from the GIL, and a
thread of low priority that holds the GIL would hold them up for even longer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

_log = logging.getLogger(__name__)

_SILENT_SECONDS = 5.0
"""The least time between two lines of the log about the progress."""

_NICENESS = 10
"""The niceness of the compiling process: a tenth of what each busy process gets, so that it ends on busy machines."""

_READY, _DONE = "ready", "done"
"""The lines that the compiling process writes: at its start, and after each kernel."""

Stop: TypeAlias = Callable[[], bool]
Load: TypeAlias = Callable[[Stop], object]
"""Loads some kernels; ends early, between two of them, once `stop()`."""


class KernelLoader:
    """Loads the kernels of a server, one request after another. Safe to use from several threads."""

    def __init__(self) -> None:
        """Makes a loader that has not begun: it keeps requests."""
        self.compiler = KernelCompiler()
        self._waiting: deque[tuple[str, Load]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_begun = False
        self._stop = threading.Event()

    @property
    def has_begun(self) -> bool:
        """True once requests are carried out, rather than kept."""
        return self._has_begun

    @property
    def is_idle(self) -> bool:
        """True if all that was asked for is loaded, or cannot be."""
        with self._lock:
            return self._thread is None and not self._waiting

    def want(self, what: str, load: Load) -> None:
        """Asks for kernels, and returns at once.

        Args:
            what: Their name in the log.
            load: Loads them; called once, in another thread. Its exceptions are logged.
        """
        with self._lock:
            self._waiting.append((what, load))
            self._start()

    def begin(self) -> None:
        """Carries out the requests so far, and each one from now on."""
        with self._lock:
            self._has_begun = True
            self._start()

    def close(self) -> None:
        """Ends without waiting. A kernel that this process itself is compiling, which takes seconds, is finished."""
        self._stop.set()
        self.compiler.close()

    def join(self) -> None:
        """Waits until everything is loaded, or, once it is closed, until the thread has ended."""
        while (thread := self._thread) is not None:
            thread.join()

    def _start(self) -> None:
        if self._has_begun and self._waiting and self._thread is None and not self._stop.is_set():
            thread = threading.Thread(target=self._run, name="gradserve-prepare")
            thread.start()
            self._thread = thread  # which `join` may find at once

    def _run(self) -> None:
        started = said = time.perf_counter()
        done = 0
        while (request := self._next()) is not None:
            what, load = request
            if (now := time.perf_counter()) - said >= _SILENT_SECONDS and not self._stop.is_set():
                said = now
                _log.info(
                    "preparing kernels: %d of %d groups are done after %.0f s, next %s; calls are served all the time",
                    done,
                    done + 1 + len(self._waiting),
                    now - started,
                    what,
                )
            try:
                load(self._stop.is_set)
            except Exception:
                _log.exception("preparing the kernels of %s failed", what)
            done += 1
            if not self._waiting:
                self.compiler.rest()
                if not self._stop.is_set():
                    _log.info("kernels prepared in %.1f s", time.perf_counter() - started)

    def _next(self) -> tuple[str, Load] | None:
        """Returns the next request; None if there is none, and then another thread has to be started for more."""
        with self._lock:
            if self._waiting and not self._stop.is_set():
                return self._waiting.popleft()
            if self._stop.is_set():
                self.compiler.rest()
            self._thread = None
            return None


class KernelCompiler:
    """Compiles kernels into the cache, in a process of low priority that starts with the first one.

    One thread at a time may use it; `close` may be called from any.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._may_start = True
        """False once it is closed, or no process can be started."""
        self._is_closed = False

    def compile(self, kernel: Mapping[str, Any]) -> bool:
        """Compiles a kernel into the cache. Blocks until that is done.

        Args:
            kernel: The arguments of `jit.compile_declared`.

        Returns:
            False if there is no such process, which leaves the kernel to this one.

        Raises:
            EOFError: The process has ended before it had compiled the kernel, as it has crashed, or the compiler is
                closed.
        """
        process = self._started()
        if self._is_closed:
            raise EOFError("the compiler is closed")
        if process is None:
            return False
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{json.dumps(kernel)}\n")
            process.stdin.flush()
        if process.stdout.readline().strip() != _DONE:
            self.rest()
            raise EOFError(f"the process that compiles it has ended with status {process.returncode}")
        return True

    def rest(self) -> None:
        """Ends the process; the next kernel starts another one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()  # the cache replaces whole files
            with contextlib.suppress(BrokenPipeError), process:  # if it had ended before it read all
                pass

    def close(self) -> None:
        """Ends the process, also in the middle of a kernel, and starts no other one."""
        with self._lock:
            self._may_start, self._is_closed = False, True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._process is not None or not self._may_start:
                return self._process
            try:
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(_NICENESS)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            except OSError:
                self._may_start = False
                return None
        assert process.stdout is not None
        if process.stdout.readline().strip() == _READY:
            return process
        self._may_start = False
        self.rest()
        return None


def main() -> None:
    """Compiles each kernel that a line of the input names, and says so; ends with the input.

    The first argument is the niceness.
    """
    os.nice(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which ends this process
        signal.signal(number, signal.SIG_IGN)
    jit = importlib.import_module("gradserve_server.devices.host.jit")
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        with contextlib.suppress(jit.KernelError):  # which the server finds, too, and logs
            jit.compile_declared(**json.loads(line))
        sys.stdout.write(f"{_DONE}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
