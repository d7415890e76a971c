"""Kernels on the host: the threads that run them, and tables of the function, the dtypes and the arguments of each.

`ForkJoin` runs one piece of work on several threads. A table is data, which declares kernels without importing Numba:
functions are imported when they are compiled.
"""

import importlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint, current
from gradserve_server.devices.host.board import CALLS, FIELDS, MOST_INSIDE, SPINNING, TICKET
from gradserve_server.devices.host.loading import KernelCompiler, KernelLoader

_LONGEST_WAIT_NS = 100_000
"""The longest time for which a helper waits for work without sleeping."""

_MOST_JOBS = 4
"""The most jobs that share helpers at the same time."""

_log = logging.getLogger(__name__)


class ForkJoin:
    """A few helper threads, for kernels that release the GIL.

    Safe to use from several threads: callers work themselves, and wait only for helpers that have begun, so they make
    progress even when all helpers are busy with other work.

    A thread that sleeps takes 50 to 300 microseconds to begin, as long as a megabyte takes. So after work a helper
    waits for more without sleeping and without the GIL, but no longer than twice the time of that work, and at most
    `_LONGEST_WAIT_NS`; it gives up the processor whenever another thread wants it. Without work it sleeps.
    """

    def __init__(self, num_threads: int, loader: KernelLoader | None = None) -> None:
        """Runs work on up to `num_threads` threads, including the caller.

        Args:
            num_threads: See above.
            loader: Loads kernels for these threads when calls ask for them; None if only `prepare` does.
        """
        self.loader = loader
        self._board = np.zeros((1 + _MOST_JOBS, FIELDS), np.int64)
        self._jobs = list(range(1, len(self._board)))
        """The rows of the board that are free. Appending and popping are atomic."""
        self._tickets = itertools.count(1)
        self._newest_ticket = 0
        self._attend: Callable[..., object] | None = None
        self._longest_wait = _LONGEST_WAIT_NS if len(os.sched_getaffinity(0)) > 1 else 0
        self._calls: deque[_Call] = deque()
        self._count_calls = threading.Lock()
        self._sleepers: deque[threading.Lock] = deque()
        """A lock for each helper that sleeps; releasing it wakes up the helper."""
        self._is_closed = False
        self._helpers = [
            threading.Thread(target=self._help, name=f"gradserve-kernel-{index}", daemon=True)
            for index in range(num_threads - 1)
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def num_threads(self) -> int:
        """The most threads that work together, including the caller."""
        return len(self._helpers) + 1

    @property
    def num_sleeping(self) -> int:
        """The number of helpers that sleep."""
        return len(self._sleepers)

    def run_shared(
        self, attend: Callable[..., object], kernel: Callable[..., object], arguments: tuple[Any, ...], num_parts: int
    ) -> None:
        """Runs a shared kernel in this thread, and at the same time in free helpers, until all its work is done.

        Args:
            attend: The compiled `sharing.attend`.
            kernel: A compiled kernel from `sharing.shared`.
            arguments: Its arguments. It does one part after another until none is left; a call in another thread then
                finds nothing to do.
            num_parts: The number of parts: no more threads than that take part.

        Raises:
            ServiceError: The work that this thread does was cancelled.
        """
        checkpoint()
        num_wanted = min(len(self._helpers), num_parts - 1)
        job = self._take_job() if num_wanted > 0 else 0
        try:
            if job:
                self._attend = attend
                ticket = next(self._tickets)
                self._board[job, MOST_INSIDE], self._board[job, TICKET] = num_wanted, ticket
                self._newest_ticket = ticket
                self._wake(num_wanted)
            kernel(self._board, job, *arguments)
        finally:
            if job:
                self._jobs.append(job)

    def run(self, work: Callable[[], object], num_parts: int) -> None:
        """Calls `work` in this thread, and at the same time in free helpers.

        Args:
            work: Does one part after another until none is left, then waits for the parts of its other calls: when one
                call returns, everything is done, and a later call finds nothing to do.
            num_parts: The number of parts: no more threads than that are woken up.

        Raises:
            BaseException: The exception of `work` in this thread. Exceptions in others are logged: their parts are
                missing, so if this can happen, `work` must tell its other calls.
        """
        call = _Call(work)
        num_wanted = min(len(self._helpers), num_parts - 1)
        if num_wanted > 0:
            self._calls.extend([call] * num_wanted)
            self._tell_spinning()
            self._wake(num_wanted)
        try:
            work()
        finally:
            call.work = None

    def run_all(self, pieces: Sequence[Callable[[], object]]) -> None:
        """Calls independent functions, several at the same time, and returns when all have returned.

        Raises:
            BaseException: The exception of the first function that failed; the others have been called, too, unless the
                work that this thread does was cancelled.
        """
        cancellation = current()
        if len(pieces) == 1:
            cancellation.check()
            pieces[0]()
            return
        work = _Pieces([partial(cancellation.run, piece) for piece in pieces])
        self.run(work.take, len(pieces))
        work.wait()

    def close(self) -> None:
        """Waits for running work, and ends the threads."""
        self._is_closed = True
        self._tell_spinning()
        self._wake(len(self._helpers))
        for helper in self._helpers:
            helper.join()

    def _take_job(self) -> int:
        try:
            return self._jobs.pop()
        except IndexError:
            return 0  # this many callers keep all processors busy anyway

    def _tell_spinning(self) -> None:
        with self._count_calls:
            self._board[0, CALLS] += 1

    def _wake(self, num_wanted: int) -> None:
        """Wakes up helpers, unless enough of them watch the board."""
        for _ in range(num_wanted - int(self._board[0, SPINNING])):
            try:
                self._sleepers.popleft().release()
            except IndexError:
                return

    def _help(self) -> None:
        wake = threading.Lock()
        wake.acquire()
        allowance = 0
        while True:
            num_calls, newest_ticket = int(self._board[0, CALLS]), self._newest_ticket
            if self._calls:
                allowance = max(self._help_a_call(), allowance)
            elif self._is_closed:
                return
            else:
                if self._attend is not None:
                    self._attend(self._board, num_calls, allowance, self._longest_wait)
                allowance = 0
                self._sleep(wake, num_calls, newest_ticket)

    def _help_a_call(self) -> int:
        """Helps a call that waits, if there is one; returns the nanoseconds to wait for the next one."""
        try:
            call = self._calls.popleft()
        except IndexError:
            return 0
        began = time.monotonic_ns()
        call.help()
        return min(2 * (time.monotonic_ns() - began), self._longest_wait)

    def _sleep(self, wake: threading.Lock, num_calls: int, newest_ticket: int) -> None:
        """Sleeps until another thread releases `wake`, unless there have been more calls or jobs.

        A caller that begins a job while this helper waits for the GIL, after it has watched the board, finds nobody
        to wake up.
        """
        self._sleepers.append(wake)
        if self._board[0, CALLS] != num_calls or self._newest_ticket != newest_ticket:
            try:
                self._sleepers.remove(wake)
            except ValueError:
                pass  # the thread that has taken it releases it
            else:
                return
        wake.acquire()


class _Pieces:
    def __init__(self, pieces: Sequence[Callable[[], object]]) -> None:
        self._waiting = deque(pieces)
        self._num_pieces = len(pieces)
        self._finished: deque[BaseException | None] = deque()
        """The exception of each piece, or None."""
        self._all_finished = threading.Event()
        if not pieces:
            self._all_finished.set()

    def take(self) -> None:
        while True:
            try:
                piece = self._waiting.popleft()
            except IndexError:
                return
            self._finished.append(_attempt(piece))
            if len(self._finished) == self._num_pieces:
                self._all_finished.set()

    def wait(self) -> None:
        self._all_finished.wait()
        error = next((each for each in self._finished if each is not None), None)
        self._finished.clear()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle would keep the work's memory until it is collected


def _attempt(piece: Callable[[], object]) -> BaseException | None:
    try:
        piece()
    except BaseException as error:
        return error
    return None


class _Call:
    """Work for helpers while `work` is there. Afterwards it holds no memory, even if no helper has come."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work: Callable[[], object] | None = work

    def help(self) -> None:
        work = self.work
        if work is None:
            return
        try:
            work()
        except BaseException:
            _log.exception("work in a helper thread failed")


Kernel: TypeAlias = Callable[..., None]

_COUNTERS = "int64[]"
_ATTEND = "int64[2], int64, int64, int64"
_NUM_COUNTERS = 5
"""The most counters of a kernel; see `intrinsics`."""

ELEMENTS: Mapping[np.dtype[Any], str] = {
    np.dtype(np.float16): "int16",
    np.dtype(ml_dtypes.bfloat16): "uint16",
    np.dtype(np.float32): "float32",
    np.dtype(np.float64): "float64",
}
"""The types in which kernels take elements of each dtype: integers for 16-bit floats, which Numba does not have."""


def is_fit(array: NDArray[Any]) -> bool:
    """Returns True if kernels can take an array as it is. Inline inputs lie anywhere in their message."""
    return array.flags.aligned and array.flags.c_contiguous


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array aligned for kernels, copied if needed: inline inputs lie anywhere in their message."""
    return array if array.flags.aligned else array.copy()


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the elements of an array for kernels: aligned, in one dimension, 16-bit floats as integers."""
    return aligned(array).reshape(-1).view(ELEMENTS[array.dtype])


@dataclass(frozen=True)
class ChunkedKernels:
    """Kernels that take chunks of their work until none is left.

    Any number of threads may do a kernel's work with the same arguments, at the same time or later; a single one does
    all of it. The result does not depend on the number of threads. The last argument of each function is an array of
    counters; the compiled kernels are shared, see `sharing`.
    """

    attend: Kernel

    def run(self, parallel: ForkJoin, kernel: Kernel, arguments: tuple[Any, ...], num_chunks: int) -> None:
        """Runs a kernel on all threads of `parallel` that are free, until all its chunks are done."""
        counters = np.zeros(_NUM_COUNTERS, np.int64)
        parallel.run_shared(self.attend, kernel, (*arguments, counters), num_chunks)


@dataclass(frozen=True)
class Declared:
    """A kernel of a table.

    Attributes:
        function: "module.function", in the package of the table.
        arguments: The types that it takes, as in C: "const {T}[], int64, float64[3]" are a read-only array, a number,
            and an array of three axes; arrays are contiguous. Names in braces come from the types of the table.
    """

    function: str
    arguments: str


KernelsT = TypeVar("KernelsT")


@dataclass(frozen=True)
class KernelTable(Generic[KernelsT]):
    """Kernels that are compiled together for one dtype.

    Attributes:
        what: What they compute, for the log.
        package: The package with the modules of the functions.
        kernels: The dataclass of the compiled kernels. Those of `ChunkedKernels` get counters as a last argument.
        types: For each dtype, the meaning of names in braces, in the order in which dtypes are prepared.
        declared: The kernels, by their names in the dataclass.
        contract: Whether a product and a sum may be computed with one rounding, on processors that can.
    """

    what: str
    package: str
    kernels: type[KernelsT]
    types: Mapping[np.dtype[Any], Mapping[str, str]]
    declared: Mapping[str, Declared]
    contract: bool = True

    def compile(
        self, dtype: np.dtype[Any], stop: Callable[[], bool], compiler: KernelCompiler | None = None
    ) -> KernelsT | None:
        """Compiles the kernels for a dtype, or loads them from the cache; returns None once `stop()`.

        The first call imports Numba, which takes half a second.

        Args:
            dtype: The dtype.
            stop: See above; asked before each kernel.
            compiler: Compiles those that are not in the cache; None: this process does.

        Raises:
            KernelError: One does not compile for this machine's processor, or needs symbols that the process does not
                have.
        """
        from gradserve_server.devices.host import jit, sharing

        compiled: dict[str, Kernel] = {}
        is_chunked = issubclass(self.kernels, ChunkedKernels)

        def compile_one(function: Kernel, arguments: str, *, is_shared: bool) -> Kernel:
            types = jit.argument_types(arguments)
            if compiler is not None and jit.misses_cache(function, types, is_shared=is_shared):
                kernel = {"module": function.__module__, "function": function.__name__, "arguments": arguments}
                try:
                    compiler.compile({**kernel, "contract": self.contract, "is_shared": is_shared})
                except EOFError as error:
                    raise jit.KernelError(f"{function.__name__} does not compile: {error}") from None
            compile_kernel = jit.compile_shared_kernel if is_shared else jit.compile_kernel
            return compile_kernel(function, types, contract=self.contract)

        if is_chunked:
            compiled["attend"] = compile_one(sharing.attend, _ATTEND, is_shared=False)
        for name, (function, arguments) in self._functions(dtype):
            if stop():
                return None
            all_arguments = f"{arguments}, {_COUNTERS}" if is_chunked else arguments
            compiled[name] = compile_one(function, all_arguments, is_shared=is_chunked)
        return self.kernels(**compiled)

    def _functions(self, dtype: np.dtype[Any]) -> Iterator[tuple[str, tuple[Kernel, str]]]:
        for name, declared in self.declared.items():
            module, _, function = declared.function.format(**self.types[dtype]).rpartition(".")
            arguments = declared.arguments.format(**self.types[dtype])
            yield name, (getattr(importlib.import_module(f"{self.package}.{module}"), function), arguments)

    def __post_init__(self) -> None:
        """Checks that every kernel of the dataclass is declared."""
        own: Any = self.kernels
        assert {field.name for field in fields(own)} - {"attend"} == set(self.declared), self.what


class PreparedKernels(Generic[KernelsT]):
    """The compiled kernels of some tables, by dtype.

    One thread prepares them, while others may use those that are ready.
    """

    def __init__(self, *tables: KernelTable[KernelsT], loader: KernelLoader | None = None) -> None:
        """Makes tables whose kernels are not ready.

        Args:
            tables: The tables, whose dtypes differ.
            loader: Loads the kernels for a dtype when `get` misses them; None if only `prepare` does.
        """
        self._tables = tables
        self._loader = loader
        self._ready: dict[np.dtype[Any], KernelsT] = {}
        self._wanted: set[np.dtype[Any]] = set()

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from the cache; ends early, between two kernels, once `stop()`.

        A dtype whose kernels cannot be compiled has none; the log says so in one line.
        """
        for table in self._tables:
            for dtype in table.types:
                self._wanted.add(dtype)
                if dtype not in self._ready and not self._load(table, dtype, stop):
                    return

    def want(self, dtype: np.dtype[Any]) -> None:
        """Asks the loader for the kernels for a dtype, if there are any, and nobody has asked before."""
        if self._loader is None or dtype in self._wanted:
            return
        for table in self._tables:
            if dtype in table.types:
                self._wanted.add(dtype)
                self._loader.want(f"{table.what} for {dtype}", partial(self._load, table, dtype))

    def get(self, dtype: np.dtype[Any]) -> KernelsT | None:
        """Returns the kernels for a dtype, if they are ready; otherwise asks the loader for them."""
        ready = self._ready.get(dtype)
        if ready is None:
            self.want(dtype)
        return ready

    def _load(self, table: KernelTable[KernelsT], dtype: np.dtype[Any], stop: Callable[[], bool]) -> bool:
        """Loads the kernels for a dtype; returns False once `stop()`."""
        from gradserve_server.devices.host.jit import KernelError

        if dtype in self._ready:
            return True
        try:
            kernels = table.compile(dtype, stop, None if self._loader is None else self._loader.compiler)
        except KernelError as error:
            if stop():
                return False
            _log.warning("no kernels of %s for %s, NumPy computes instead: %s", table.what, dtype, error)
            return True
        if kernels is None:
            return False
        self._ready[dtype] = kernels
        return True
