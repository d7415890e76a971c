"""The workers of a training run on this machine, and their restarts."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from gradserve_server.commands.run.processes import Child, Guard, Output, Program, Stopping

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
