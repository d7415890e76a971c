"""One simulated world: clients, and servers that crash one after the other on the same disk."""

import asyncio
import contextlib
import math
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gradserve_server.storage.directory import StateError
from tests.simulation.accounts import check_files, check_memory
from tests.simulation.accumulators.part import Accumulators
from tests.simulation.clock import Moment, StuckError, VirtualLoop
from tests.simulation.disk import CrashError
from tests.simulation.layers.part import Layers
from tests.simulation.leases.part import Leases
from tests.simulation.network import Network
from tests.simulation.parameters.part import Parameters
from tests.simulation.part import Part, state_of
from tests.simulation.promises import BrokenPromiseError, check
from tests.simulation.server import Server
from tests.storage.copies import copy_state

_POINTS = {"write": 0.01, "flush": 0.03, "before the commit": 0.03, "after the commit": 0.03, "any": 0.002}
"""How likely a crash is at each point."""
_TRACE = 40

PARTS: tuple[Callable[["World", random.Random], Part], ...] = (Accumulators, Layers, Leases, Parameters)
NUM_CASTS = len(PARTS) + 1
"""Every so many worlds, one has all parts. The others have one each, which happens there the more often."""


def cast_of(seed: int) -> tuple[Callable[["World", random.Random], Part], ...]:
    """Returns the parts of a world."""
    number = seed % NUM_CASTS
    return PARTS[number : number + 1] or PARTS


class FailedSeedError(AssertionError):
    """A world in which a promise was broken, with the last that happened in it."""

    def __init__(self, seed: int, trace: list[str], error: BaseException) -> None:
        last = "\n".join(f"  {line}" for line in trace[-_TRACE:])
        super().__init__(f"seed {seed}:\n{last}\n{type(error).__name__}: {error}")


class World:
    """Everything that happens for one seed.

    Attributes:
        parts: The things that there are.
        epoch: The number of crashes so far.
        was_full: Whether the disk was full in this epoch.
        is_over: Whether the server has crashed.
        trace: What happened.
        faults: How often each fault happened in each state of each part.
        network: What carries the calls of this epoch.
        server: The server of this epoch.
    """

    def __init__(self, seed: int, num_crashes: int = 4) -> None:
        self.seed = seed
        self.epoch = 0
        self.was_full = False
        self.is_over = False
        self.trace: list[str] = []
        self._chance = random.Random(seed)
        self._num_crashes = num_crashes
        self.faults: Counter[tuple[str, str, str]] = Counter()
        self.parts = [part(self, self._chance) for part in cast_of(seed)]
        self._pace = 3.0 if cast_of(seed) == (Leases,) else 1.0  # until leases end
        self._now = 0.0
        self._error: BaseException | None = None

    @property
    def num_faults(self) -> int:
        """The number of faults so far."""
        return sum(count for (part, _, _), count in self.faults.items() if part == self.parts[0].name)

    @property
    def moment(self) -> Moment:
        """What time it is."""
        return self._loop.moment

    def run(self) -> None:
        """Runs until the last server has ended.

        Raises:
            FailedSeedError: A promise was broken.
        """
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            for epoch in range(self._num_crashes + 1):
                self.epoch = epoch
                is_last = epoch == self._num_crashes
                try:
                    self._live(Path(folder), is_last=is_last)
                except Exception as found:
                    error: BaseException = found
                    while isinstance(error, BaseExceptionGroup):
                        error = error.exceptions[0]
                    raise FailedSeedError(self.seed, self.trace, error) from error

    def note(self, what: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{self.epoch} {self._loop.time():8.3f} {what}")

    def _live(self, folder: Path, *, is_last: bool) -> None:
        """Runs one server."""
        # The end of the server before this one has drawn numbers, too, and not always as many.
        self._chance.seed(f"{self.seed} {self.epoch}")
        self._loop = loop = VirtualLoop(self._now)
        loop.set_exception_handler(self._unexpected)
        self.is_over, self.was_full, self._is_last = False, False, is_last
        path = folder / str(self.epoch)
        self.network = Network(self._chance, self.count, self._fail)
        with contextlib.ExitStack() as patched:
            patched.callback(loop.close)
            self.server = Server(path, self._chance, loop.time, patched)
            patched.callback(self.server.store.abandon)
            patched.callback(self._end_tasks)
            main = loop.create_task(self._main(path))
            main.add_done_callback(lambda _: None if self.is_over else loop.stop())
            with contextlib.suppress(CrashError):
                loop.run_forever()
            if main.done() and not main.cancelled():
                main.result()
        if self._error is not None:
            raise self._error
        self._now = loop.now
        if self.epoch:
            shutil.rmtree(folder / str(self.epoch - 1), ignore_errors=True)

    def _end_tasks(self) -> None:
        self.is_over = True
        self._loop.on_turn = lambda _: None
        self.server.accumulators.close()
        self.server.parameters.close()
        self._loop.run_until_complete(asyncio.sleep(0))  # a task that never began cannot clean up
        while tasks := asyncio.all_tasks(self._loop):  # some begin others when they end
            for task in tasks:
                task.cancel()
            with contextlib.suppress(StuckError):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0))

    async def _main(self, path: Path) -> None:
        server = self.server
        await self._recover(path)
        self._loop.on_turn = self._on_turn
        server.disk.on_point = self._maybe_crash
        expiry = server.start()
        expiry.add_done_callback(self._expiry_ended)
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(_run(work)) for part in self.parts for work in part.workers()]
            await self._trouble()
            for worker in workers:
                worker.cancel()
        await self._finish()
        expiry.cancel()

    async def _trouble(self) -> None:
        """Lets the disk and the network get into trouble now and then, for a while."""
        chance, disk = self._chance, self.server.disk
        for _ in range(chance.randint(2, 12)):
            await asyncio.sleep(chance.uniform(0.05, 1.0) * self._pace)
            event = chance.random()
            if event < 0.1:
                disk.is_full = self.was_full = True
                self.count("the disk is full")
                self.note("the disk is full")
            elif event < 0.3:
                disk.is_full = False
            elif event < 0.33 and not self._is_last:
                disk.fails_at = chance.choice(["pwrite", "fdatasync"])
                self.count(f"a {disk.fails_at} fails")
                self.note(f"the next {disk.fails_at} fails")
            elif event < 0.4:
                client = chance.choice([each for part in self.parts for each in part.clients])
                self.network.cut(client)
                self.note(f"{client} is cut off")
            elif event < 0.6:
                self.network.mend()
            elif event < 0.65:
                self.count("the server is suspended")
                self._loop.suspend(chance.choice([1.0, 10.0, 100.0]))
                self.note("the server was suspended")
            if self.server.failure is not None:
                await asyncio.sleep(chance.choice([0.0, 0.1]))
                self._crash("a failure of the disk")
        if not self._is_last:
            self._crash("the end of an epoch")
        disk.is_full = False
        self.network.mend()

    async def _recover(self, path: Path) -> None:
        server = self.server
        check_files(server)
        await server.restore()
        self.note("a server starts")
        for part in self.parts:
            part.recovered()
        check_memory(server)
        if self.epoch and self._chance.random() < 0.2:
            await self._rot(path)

    async def _rot(self, path: Path) -> None:
        """Changes a byte on disk: another server must notice."""
        stored = [each for each in self.server.store._blobs.values() if each.checksums]
        if not stored:
            return
        blob = self._chance.choice(stored)
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in blob.specs)
        place = blob.extents[0]
        file = path / "segments" / f"{place.segment:06}.segment"
        with file.open("r+b") as opened, contextlib.ExitStack() as patched:
            position = place.offset + self._chance.randrange(min(size, place.num_bytes))
            opened.seek(position)
            before = opened.read(1)
            copy = path.with_name("rotten")
            copy_state(path, copy, ignore=shutil.ignore_patterns("lock", "*-shm"))
        with (copy / "segments" / file.name).open("r+b") as opened:
            opened.seek(position)
            opened.write(bytes([before[0] ^ 1]))
        with contextlib.ExitStack() as patched:
            other = Server(copy, self._chance, self._loop.time, patched)
            patched.callback(shutil.rmtree, copy)
            patched.callback(other.store.abandon)
            running = asyncio.all_tasks()
            try:
                await other.restore()
            except StateError:
                return
            finally:
                other.parameters.close()  # rounds end by themselves
                for task in asyncio.all_tasks() - running:
                    task.cancel()
            raise BrokenPromiseError(f"byte {position} of {file.name} has changed, and nobody noticed")

    async def _finish(self) -> None:
        """Ends what is under way, and checks what is left."""
        server = self.server
        await asyncio.sleep(5)
        self._check_reservations()
        for part in self.parts:
            await part.finish()
        await server.store.flush()
        self._check_reservations()
        left = [server.memory.used, server.handles.used, server.bookkeeping, server.lifetimes.num_leases]
        check(left == [0, 0, 0, 0], f"memory, handles, bookkeeping and leases are left: {left}")
        check(not server.store.blobs, f"blobs {server.store.blobs} are left")

    def _check_reservations(self) -> None:
        check_files(self.server)
        check_memory(self.server)

    def _on_turn(self, is_quiet: bool) -> None:
        if self.is_over:
            return
        server = self.server
        if server.failure is not None:
            return  # It is about to stop, and answers nothing but that.
        try:
            for part in self.parts:
                part.observe(is_quiet)
            if is_quiet and server.store.is_idle and not self.network.num_serving:
                check_memory(server)
        except AssertionError as error:
            self._stop(error)
        if is_quiet:
            with contextlib.suppress(CrashError):
                self._maybe_crash("any")

    def _maybe_crash(self, point: str) -> None:
        if not self.is_over and not self._is_last and self._chance.random() < _POINTS[point]:
            self._crash(point)

    def _crash(self, point: str) -> None:
        """Ends the server at once."""
        loses_power = self._chance.random() < 0.7
        self._on_turn(False)
        fault = f"{'power is lost' if loses_power else 'the server is killed'} at: {point}"
        self.note(fault)
        self.count(fault)
        self.server.disk.copy_after_crash(self.server.disk.path.with_name(str(self.epoch + 1)), loses_power=loses_power)
        self.is_over = True
        self._loop.stop()
        raise CrashError

    def count(self, fault: str) -> None:
        """Counts a fault, and the states that it finds."""
        if not self.is_over:
            for part in self.parts:
                self.faults[part.name, fault, state_of(part.present())] += 1

    def _stop(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self.is_over = True
        self._loop.stop()

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if loop is self._loop:
            self._fail(context.get("exception") or RuntimeError(context["message"]))

    def _fail(self, error: BaseException) -> None:
        if not self.is_over and not isinstance(error, CrashError):
            self._stop(error)

    def _expiry_ended(self, expiry: "asyncio.Task[None]") -> None:
        if not expiry.cancelled() and (error := expiry.exception()) is not None:
            self._fail(error)


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
