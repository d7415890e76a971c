"""One simulated world of several servers, that fail and come back, and of workers whose accumulators they share."""

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gradserve
from gradserve_protocol import placement
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage import store as store_module
from gradserve_server.storage.segments import Segments
from tests.simulation.clock import StuckError, VirtualLoop
from tests.simulation.disk import SEGMENT_BYTES
from tests.simulation.promises import BrokenPromiseError, check
from tests.simulation.sharding.network import Network
from tests.simulation.sharding.run import CLIENT_LEASE, UNDELIVERED_LEASE, Run, make_task
from tests.simulation.sharding.truth import Truth
from tests.simulation.sharding.worker import LOST_FIELD, NAMES, Worker

_NUM_WORKERS = 3
_TRACE = 60
_MOST_TURNS = 100_000
"""Worlds have some thousands of turns of the event loop."""
_KILL = 0.0006
"""How likely a server is killed at the end of a turn of the event loop."""


class FailedSeedError(AssertionError):
    """A world in which a promise was broken, with the last that happened in it."""

    def __init__(self, seed: int, trace: list[str], error: BaseException) -> None:
        last = "\n".join(f"  {line}" for line in trace[-_TRACE:])
        super().__init__(f"seed {seed}:\n{last}\n{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Spec:
    """The properties of an accumulator."""

    durability: str
    deterministic: bool
    keep_averages: int


class World:
    """Everything that happens for one seed.

    Attributes:
        truth: What was sent, decided and answered.
        network: What carries the calls.
        specs: The accumulators.
        is_calm: Whether the network is fast and servers are killed rarely, so that there are many rounds, whose steps
            are often set back, and old decisions that arrive late.
        deletions: How likely a worker deletes an accumulator, and not something else.
        deleting: Those that somebody has begun to delete.
        trace: What happened.
        faults: How often each fault happened.
    """

    worker_class: type[Worker] = Worker

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.trace: list[str] = []
        self.faults: Counter[str] = Counter()
        self._chance = chance = random.Random(seed)
        self._clocks = random.Random(f"clocks {seed}")
        self.is_calm = seed % 4 == 1
        self._size = chance.choice([2, 3])
        kind = chance.choices(["all", "none", "some"], [0.55, 0.3, 0.15])[0]
        self._has_disk = [kind == "all" or (kind == "some" and chance.random() < 0.5) for _ in range(self._size)]
        levels = ["round", "gradient", "gradient", "none"] if all(self._has_disk) else ["none"]
        self.specs = {
            name: Spec(chance.choice(levels), chance.random() < 0.4, chance.choice([1, 1, 2])) for name in NAMES
        }
        self._loses_disk = self._one_that_loses_its_disk()
        self._has_lost_disk = False
        self.deletions = 0.3 if seed % 4 == 3 else 0.005 if self.is_calm else 0.015
        self.truth = Truth()
        self.deleting: set[str] = set()
        self._num_gradients = self._num_turns = 0
        self._starting: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._is_troubled = self._is_over = False

    def run(self) -> None:
        """Runs until all is over.

        Raises:
            FailedSeedError: A promise was broken.
        """
        memory = Path("/dev/shm")
        self._loop = loop = VirtualLoop(0.0)
        with (
            tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
            contextlib.closing(loop),
            patch.object(store_module, "Segments", lambda path: Segments(path, SEGMENT_BYTES)),
            patch.object(placement, "SMALLEST_PIECE_BYTES", 1),
        ):
            self._folder = Path(folder)
            loop.set_task_factory(make_task)
            loop.set_exception_handler(self._unexpected)
            self.network = Network(self._chance, self._size, self._fail, is_calm=self.is_calm)
            main = loop.create_task(self._main())
            main.add_done_callback(lambda _: self._stop())
            try:
                loop.run_forever()
                if self._error is None:
                    main.result()
            except Exception as error:
                self._error = self._error or error
            finally:
                self._end()
            self.faults.update(self.network.faults)
            if self._error is not None:
                found: BaseException = self._error
                while isinstance(found, BaseExceptionGroup):
                    found = found.exceptions[0]
                raise FailedSeedError(self.seed, self.trace, found) from found

    def note(self, what: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{self._loop.time():8.3f} {what}")

    def count(self, fault: str) -> None:
        """Counts a fault."""
        self.faults[fault] += 1

    def new_gradient(self) -> int:
        """Returns the number of a new gradient."""
        self._num_gradients += 1
        return self._num_gradients - 1

    def is_durable(self, name: str) -> bool:
        """Returns True if nothing of an accumulator may be lost."""
        return all(self._has_disk) and self.specs[name].durability != "none"

    def _is_never_lost(self, name: str) -> bool:
        return self.is_durable(name) and not self._has_lost_disk

    def _one_that_loses_its_disk(self) -> int | None:
        """Returns the index of a server that is started again without its disk, None for none; no home does that."""
        if not self.is_calm or not all(self._has_disk):
            return None
        members = [Member("train", index, self._size) for index in range(self._size)]
        keys = [ResourceKey("default", name) for name in NAMES]
        found = [each.index for each in members if not any(map(each.is_home, keys))]
        return found[0] if found else None

    def check_may_be_lost(self, transport: Any, message: str) -> None:
        """Checks that a client could be told that a round is lost: it was, or is over for long."""
        decided = transport.decided
        check(decided is not None, f"lost without an answer of the home: {message}")
        incarnation = decided.parts.home_incarnation
        life = self.truth.lives[incarnation]
        run, answered_at = transport.answered_by
        is_forgotten = run not in self._running or self._loop.time() > answered_at + UNDELIVERED_LEASE
        is_over = max(life.decisions) > decided.round - 1 and is_forgotten
        there = {each.incarnation: each for run in self._running for each in run.at_home()}
        at_home = there.get(incarnation)
        is_deleted = at_home is None
        # What the step was set back behind is not on disk any more.
        is_abandoned = run not in self._running and at_home is not None and at_home.rounds.epoch != decided.parts.epoch
        is_kept = all(self._has_disk) and at_home is not None and at_home.spec.durability.name != "NONE"
        is_kept = (is_kept and not self._has_lost_disk) or life.num_kills == self.truth.num_kills
        check(is_over or is_deleted or is_abandoned or not is_kept, f"it is durable, and not over: {message}")

    @property
    def _running(self) -> list[Run]:
        return [each for each in self.network.runs if each is not None]

    async def _main(self) -> None:
        for target in range(self._size):
            await self._start(target)
        workers = [self.worker_class(f"w{number}", self, self._chance) for number in range(_NUM_WORKERS)]
        self._loop.on_turn = self._on_turn
        self._is_troubled = True
        working = [asyncio.ensure_future(each.work()) for each in workers]
        for each in working:
            each.add_done_callback(self._worker_ended)
        await self._trouble()
        self._is_troubled = False
        self.note("the trouble is over")
        for each in working:
            each.cancel()
        await asyncio.wait(working)
        self.network.heal()
        for target in range(self._size):
            if self.network.runs[target] is None:
                await self._start(target)
        await self._finish(workers)

    async def _trouble(self) -> None:
        chance = self._chance
        for _ in range(chance.randint(8, 30)):
            await asyncio.sleep(chance.uniform(0.05, 1.0))
            event, target = chance.random(), chance.randrange(self._size)
            if self.is_calm:
                event = 0.55 if event < 0.06 else 1.0
            if event < 0.25:
                self.network.cut(f"w{chance.randrange(_NUM_WORKERS)}", target)
            elif event < 0.45:
                self.network.mend()
            elif event < 0.6 and self.network.runs[target] is not None:
                self._kill(target, "at any time")
            elif event < 0.64:
                for each in range(self._size):
                    if self.network.runs[each] is not None:
                        self._kill(each, "with all others")

    def _on_turn(self, is_quiet: bool) -> None:
        if self._error is not None:
            return
        self._num_turns += 1
        try:
            check(self._num_turns < _MOST_TURNS, "somebody does the same again and again")
            self._look()
        except Exception as error:
            self._fail(error)
        if self._is_troubled and not self.is_calm and self._chance.random() < _KILL:
            target = self._chance.randrange(self._size)
            if self.network.runs[target] is not None:
                self._kill(target, "between two turns")

    def _look(self) -> None:
        for run in self._running:
            self.truth.observe(run)
        for run in self._running:
            for each in self._running:
                self.truth.check_reducible(run, each, NAMES, is_durable=self._is_never_lost)

    # Servers

    async def _start(self, target: int) -> None:
        folder = self._folder / str(target) if self._has_disk[target] else None
        run = Run(Member("train", target, self._size), folder, self._chance, self._loop.time, self._wall_clock(target))
        await run.begin(run.start())
        self.truth.observe(run)
        self.network.runs[target] = run
        self.note(f"server {target} starts {'with' if folder else 'without'} a disk")

    def _wall_clock(self, target: int) -> Callable[[], int]:
        """Returns a clock that a server with a disk starts with: it may have been set back."""
        is_remembered = self._has_disk[target] and target != self._loses_disk
        ahead = self._clocks.uniform(0.0, 30.0) if is_remembered else 30.0 * target
        return lambda: int((1_800_000_000 + ahead + self._loop.time()) * 1e9)

    def _kill(self, target: int, when: str) -> None:
        run = self.network.runs[target]
        assert run is not None
        self.truth.observe(run)
        self.network.runs[target] = None
        run.kill()
        self.truth.num_kills += 1
        self.note(f"server {target} is killed")
        self.count(f"a server is killed {when}")
        task = self._loop.create_task(self._start_again(target, run))
        self._starting.add(task)
        task.add_done_callback(self._started)

    async def _start_again(self, target: int, run: Run) -> None:
        await run.bury()
        if target == self._loses_disk and self._clocks.random() < 0.5:
            shutil.rmtree(self._folder / str(target))
            self._has_lost_disk = True
            self.count("a server loses its disk")
        await asyncio.sleep(self._chance.choice([0.01, 0.5, 3.0]))
        if self.network.runs[target] is None and self._is_troubled:
            await self._start(target)

    # The end

    async def _finish(self, workers: list[Worker]) -> None:
        """Ends what is under way, lets all workers go on, and checks what is left."""
        await asyncio.sleep(10.0)  # what is on its way arrives, and what was given up ends
        for worker in workers:
            worker.opened.clear()
        for name in NAMES:
            await self._finish_accumulator(name, workers)
        for worker in workers:
            worker.transport.abandon()
        await asyncio.sleep(CLIENT_LEASE + 3.0)
        for run in self._running:
            left = [each.name for each in run.accumulators()]
            expected = sorted(name for name in (f"default/{each}" for each in NAMES) if name in left)
            check(sorted(left) == expected, f"server {run.place.index} has kept {left} of clients that are gone")
        for name in NAMES:
            await workers[0].client.delete_accumulator(name)
        await asyncio.sleep(1.0)
        for run in self._running:
            check(run.used == (0, 0, 0, 0), f"server {run.place.index} counts {run.used} after the end")
            if run.store is not None:
                await run.store.flush()
                check(not run.store.blobs, f"server {run.place.index} has blobs {run.store.blobs}")

    async def _finish_accumulator(self, name: str, workers: list[Worker]) -> None:
        acc = await self._opened(name, workers)
        life = (await acc.info()).incarnation
        left = await acc.num_accumulated()
        if left:
            try:
                await workers[0]._checked(name, acc.take_grad(left, timeout=60.0))
            except gradserve.AbortedError as error:
                check(error.field == LOST_FIELD, str(error))
                self.check_may_be_lost(workers[0].transport, str(error))
        step = 0
        for _ in range(4):
            await asyncio.sleep(UNDELIVERED_LEASE + 1.0)
            step = (await acc.info()).global_step
            rounds = [each.round_with_others(name, step, len(workers)) for each in workers]
            pulled = await asyncio.gather(*rounds)
            check(
                all(each.num_gradients == len(workers) for each in pulled), f"{[each.num_gradients for each in pulled]}"
            )
        if self.is_durable(name):
            self.truth.check_counted(life)
        self._check_parts(name, life)

    async def _opened(self, name: str, workers: list[Worker]) -> Any:
        """Opens an accumulator, of which nothing can be lost any more."""
        for worker in workers:
            acc = await worker.accumulator(name)
            await acc.info()
        return workers[0].opened[name]

    def _check_parts(self, name: str, incarnation: str) -> None:
        """Checks that servers hold nothing of workers that are gone, and only the averages that the home keeps."""
        (home,) = [each for run in self._running for each in run.at_home() if each.incarnation == incarnation]
        kept = self.specs[name].keep_averages
        counted = {part_id for each in home._averages.all_kept for part_id in each.parts.ids}
        for run in self._running:
            for each in run.accumulators():
                if each.name == f"default/{name}" and each.shard is not None:
                    rounds = len(each.shard._reduced)
                    check(
                        each.incarnation == incarnation,
                        f"server {run.place.index} has {each.incarnation} of {name}, not {incarnation}",
                    )
                    parts = [key for key in each.shard._parts if key.id not in counted]
                    check(not parts, f"server {run.place.index} holds gradients of {name} that no round needs: {parts}")
                    check(rounds <= kept + 1, f"server {run.place.index} keeps {rounds} averages of {name}, not {kept}")

    def _stop(self) -> None:
        if not self._is_over:
            self._loop.stop()

    def _end(self) -> None:
        self._is_over = True
        self._loop.on_turn = lambda _: None
        for run in self._running:
            run.kill()
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            with contextlib.suppress(StuckError):
                self._loop.run_until_complete(asyncio.wait(tasks))
        for run in self._running:
            if run.store is not None:
                run.store.abandon()

    def _worker_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            self._fail(task.exception() or BrokenPromiseError("a worker has ended"))

    def _started(self, task: "asyncio.Task[None]") -> None:
        self._starting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._fail(context.get("exception") or RuntimeError(context["message"]))

    def _fail(self, error: BaseException) -> None:
        if not self._is_over and self._error is None:
            self._error = error
            self._loop.stop()
