"""The processes that a command starts, and fleets of them: each in its own group, with output in lines, none left."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20
_PROGRESS_SECONDS = 1.0
"""The time between two pictures of a progress bar, which overwrites its line instead of ending it."""
_LAST_OUTPUT_SECONDS = 1.0
"""The wait for output of programs that have left the group of a worker that has ended."""
_SAME_STOP_SECONDS = 0.5
"""Seconds in which further signals count as the same stop: terminals and `timeout` signal a process and its group."""
_COLOURS = (36, 33, 32, 35, 34, 31)

_GUARD = """
import os, shutil, signal, sys, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
def send(number):
    for group in tuple(groups):
        try:
            os.killpg(group, number)
        except OSError:
            groups.discard(group)
send(signal.SIGTERM)
end = time.monotonic() + 5
while groups and time.monotonic() < end:
    time.sleep(0.05)
    send(0)
send(signal.SIGKILL)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""A program that reads the groups that begin and end. When the pipe closes, it ends the others and removes a folder."""


class Guard:
    """A process that ends the groups of the others, and removes a folder, even if this process is killed.

    Use it in a `with` block.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> "Guard":
        command = [sys.executable, "-I", "-S", "-c", _GUARD, str(self._folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def add(self, group: int) -> None:
        """Takes charge of a group of processes."""
        self._write(f"+{group}\n")

    def discard(self, group: int) -> None:
        """Forgets a group that has ended."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # Somebody has killed it; the others are still ended in order.
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


class Output:
    """Copies the output of processes to this one's, in whole lines with the name of the process before them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Makes an output that is coloured on terminals, unless NO_COLOR is set."""
        self._may_colour = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"

    def prefix(self, label: str, stream: BinaryIO) -> bytes:
        """Returns what stands before the lines of a process on a stream."""
        text = f"[{label}] "
        if self._may_colour and stream.isatty():
            colour = _COLOURS[int(label) % len(_COLOURS)] if label.isdecimal() else 2
            text = f"\x1b[{colour}m[{label}]\x1b[0m "
        return text.encode()

    async def copy(
        self, source: asyncio.StreamReader, label: str, stream: BinaryIO, on_line: Callable[[str], object] | None = None
    ) -> None:
        """Copies until the source ends.

        A line goes on when it is complete, or the source has ended. Of one that overwrites itself, as progress bars do,
        the latest state goes on, at most every second.

        Args:
            source: The output of a process.
            label: The name of the process.
            stream: The stream to write to.
            on_line: Is called with each line.
        """
        prefix, now = self.prefix(label, stream), asyncio.get_running_loop().time
        rest, shown_at = b"", now()
        while chunk := await source.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE or (b"\r" in rest.rstrip(b"\r") and now() - shown_at >= _PROGRESS_SECONDS):
                lines.append(rest)
                rest = b""
            if lines:
                shown_at = now()
                _write(stream, prefix, lines, on_line)
        if rest:
            _write(stream, prefix, [rest], on_line)


def _write(stream: BinaryIO, prefix: bytes, lines: Sequence[bytes], on_line: Callable[[str], object] | None) -> None:
    shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
    try:
        stream.write(b"".join(prefix + line + b"\n" for line in shown))
        stream.flush()
    except BrokenPipeError:  # Nobody reads it any more, as after `| head`: training goes on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if on_line is not None:
        for line in shown:
            on_line(line.decode(errors="replace"))


@dataclass(frozen=True)
class Program:
    """A program to start.

    Attributes:
        label: Its name before the lines of its output.
        command: The program and its arguments.
        variables: Its environment.
    """

    label: str
    command: Sequence[str]
    variables: Mapping[str, str]


class Child:
    """A running program, and all processes that it starts in its group."""

    def __init__(self, program: Program, guard: Guard) -> None:
        """Starts the program; its output waits in pipes until `wait`.

        Raises:
            OSError: It cannot be started.
        """
        self._program = program
        self._guard = guard
        self._process = subprocess.Popen(
            program.command,
            env=program.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        guard.add(self._process.pid)

    def send(self, number: int) -> None:
        """Sends a signal to the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def wait(self, output: Output, on_error_line: Callable[[str], object] | None = None) -> int:
        """Copies the output; returns the exit code, 128 + N after signal N, when the program and its output have ended.

        What the program has left running in its group is killed then.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        loop = asyncio.get_running_loop()
        copies = [
            asyncio.create_task(output.copy(await _reader(pipe), self._program.label, stream.buffer, hook))
            for pipe, stream, hook in (
                (self._process.stdout, sys.stdout, None),
                (self._process.stderr, sys.stderr, on_error_line),
            )
        ]
        ended: asyncio.Future[int] = loop.create_future()
        # asyncio's processes count as running while somebody else holds their pipes open.
        threading.Thread(
            target=lambda: loop.call_soon_threadsafe(ended.set_result, self._process.wait()), daemon=True
        ).start()
        code = await ended
        self.send(signal.SIGKILL)
        self._guard.discard(self._process.pid)
        _, late = await asyncio.wait(copies, timeout=_LAST_OUTPUT_SECONDS)
        for each in late:
            each.cancel()
        return code if code >= 0 else 128 - code


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


class Stopping:
    """The request to end everything: a signal to this process, or a failure.

    Attributes:
        begun: Set by the first request.
        is_urgent: Set by a second signal.
        number: The signal that workers are to get.
        code: The exit code of this process then.
    """

    def __init__(self) -> None:
        """Takes over SIGINT, SIGTERM and, unless it is ignored as under nohup, SIGHUP. Call it in an event loop."""
        self.begun, self.is_urgent = asyncio.Event(), asyncio.Event()
        self.number, self.code = signal.SIGTERM, 0
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._wake)

    def _wake(self, number: int, _frame: object) -> None:
        # The handlers of a loop end with it, and a later signal would then keep this process from tidying up.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.begun.is_set():
            self._at = self._loop.time()
            self.begin(number if number != signal.SIGHUP else signal.SIGTERM, 128 + number)
        elif self._loop.time() - self._at > _SAME_STOP_SECONDS:
            self.is_urgent.set()

    def begin(self, number: signal.Signals, code: int) -> None:
        """Begins to end everything, unless that has begun."""
        if not self.begun.is_set():
            self.number, self.code = number, code
            self.begun.set()

    async def ended_in_time(self, tasks: "set[asyncio.Task[int]]", seconds: float) -> bool:
        """Waits for tasks to end, for so many seconds or until it is urgent; returns whether they have."""
        urgent = asyncio.create_task(self.is_urgent.wait())
        everything = asyncio.gather(*tasks, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {urgent, everything}
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        urgent.cancel()
        return everything.done()


FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
GRACE_SECONDS = 10.0
"""The time for workers to end after a signal; then they are killed."""


class Fleet:
    """Workers that are started again when they fail."""

    def __init__(
        self,
        programs: Sequence[Program],
        num_needed: int,
        max_restarts: int,
        guard: Guard,
        output: Output,
        stopping: Stopping,
        tell: Callable[[str], object],
    ) -> None:
        """Makes a fleet whose workers do not run yet.

        Args:
            programs: The programs of the workers, by rank.
            num_needed: The number of workers that must not have failed: otherwise all others are ended.
            max_restarts: The number of restarts of each worker.
            guard: Ends them if this process is killed.
            output: Copies their output.
            stopping: Says when to end them.
            tell: Prints a line about a worker.
        """
        self._programs = programs
        self._num_needed = num_needed
        self._max_restarts = max_restarts
        self._guard = guard
        self._output = output
        self._stopping = stopping
        self._tell = tell
        self._children: set[Child] = set()
        self._ending = asyncio.Event()

    async def run(self) -> int:
        """Runs the workers to their end; returns the exit code.

        It is 0 if all have ended with 0, but for those that failed while enough others went on. Otherwise it is that of
        the worker with which too many had failed, or the one of `stopping`.

        Raises:
            OSError: A worker cannot be started; the others have been ended.
        """
        running = {asyncio.create_task(self._keep(each)) for each in self._programs}
        stop = asyncio.create_task(self._stopping.begun.wait())
        num_failed = 0
        try:
            while running:
                done, _ = await asyncio.wait({*running, stop}, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    await self._end(running, self._stopping.number)
                    return self._stopping.code
                for each in done:
                    running.discard(each)
                    if code := each.result():
                        num_failed += 1
                        if len(self._programs) - num_failed < self._num_needed:
                            await self._end(running, signal.SIGTERM)
                            return code
        except OSError:
            await self._end(running, signal.SIGTERM)
            raise
        finally:
            stop.cancel()
        return 0

    async def _keep(self, program: Program) -> int:
        """Runs a worker until it ends with 0, has no restarts left, or all are to end; returns its last exit code."""
        restart = 0
        while True:
            child = Child(program, self._guard)
            self._children.add(child)
            code = await child.wait(self._output)
            self._children.discard(child)
            if code == 0 or self._ending.is_set() or self._stopping.begun.is_set():
                return code
            how = f"worker {program.label} {described_end(code)}"
            if restart == self._max_restarts:
                self._tell(f"{how}; it has been started {1 + restart} times and is not started again")
                return code
            pause = min(FIRST_PAUSE_SECONDS * 2**restart, _LONGEST_PAUSE_SECONDS)
            restart += 1
            self._tell(f"{how}; restart {restart} of {self._max_restarts} in {pause:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
                return code

    async def _end(self, running: "set[asyncio.Task[int]]", number: signal.Signals) -> None:
        self._ending.set()
        if not running:
            return
        for child in self._children:
            child.send(number)
        if not await self._stopping.ended_in_time(running, GRACE_SECONDS):
            for child in self._children:
                child.send(signal.SIGKILL)
            await asyncio.gather(*running, return_exceptions=True)


def described_end(code: int) -> str:
    """Returns how a process has ended, as an end of a sentence."""
    if code <= 128:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with {code}"
