"""Streams: work in order on each, in no order between them but what events say."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

LEGACY = 0
"""The default stream, which waits for those that are not non-blocking, and they for it."""


@dataclass(eq=False)
class Queue:
    """A stream.

    Attributes:
        ptr: Its cudaStream_t.
        gpu: The index of its GPU.
        is_blocking: True if it waits for the default stream, and the default stream for it.
        issued: The number of its newest work. Works are numbered from 1.
        done: The number of its newest work that has run.
        observed: The number of its newest work of which the host knows that it has run.
        clock: What of other streams comes before its next work: their newest numbers.
        users: The threads in whose blocks it is current.
        is_destroyed: True if nothing may be queued any more.
    """

    ptr: int
    gpu: int
    is_blocking: bool
    issued: int = 0
    done: int = 0
    observed: int = 0
    clock: dict[Queue, int] = field(default_factory=dict)
    waiting: deque[Work] = field(default_factory=deque)
    users: set[int] = field(default_factory=set)
    is_destroyed: bool = False

    def comes_after(self, queue: Queue, number: int) -> bool:
        """Returns True if the next work here surely comes after work of some queue."""
        return queue is self or number <= queue.observed or number <= self.clock.get(queue, 0)

    def moment(self) -> dict[Queue, int]:
        """Returns all that comes before the next work here."""
        return {**self.clock, self: self.issued}

    def wait_for(self, moment: Mapping[Queue, int]) -> None:
        for queue, number in moment.items():
            if queue is not self:
                self.clock[queue] = max(number, self.clock.get(queue, 0))


@dataclass(eq=False)
class Work:
    """Something that is queued.

    Attributes:
        run: Does it.
        needs: What must have run before, besides the earlier work of its own queue.
        is_ready: Returns True if nothing outside of this process is missing.
        since: When it was queued.
    """

    run: Callable[[], None]
    needs: dict[Queue, int]
    is_ready: Callable[[], bool]
    since: float


def always() -> bool:
    return True


class Lock:
    """A lock that a thread may take again, and that knows whose it is."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0

    @property
    def is_mine(self) -> bool:
        """True if this thread has it: what the collector of garbage runs now must change nothing."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()


class Scheduler:
    """Runs the work of all queues, as late as it may and in any order that it may."""

    def __init__(self, seed: int, patience_seconds: float) -> None:
        self.lock = Lock()
        """Held while anything here changes, and never while work runs."""
        self.queues: dict[int, Queue] = {}
        self._random = random.Random(seed)
        self._patience = patience_seconds
        self._running = threading.Lock()
        self._arrived = threading.Event()
        self._is_closed = False
        self._is_lazy = False
        self._background = threading.Thread(target=self._run_late, name="stand-in-gpu", daemon=True)
        self._background.start()

    def add(self, queue: Queue) -> None:
        with self.lock:
            self.queues[queue.ptr] = queue

    @contextmanager
    def waited_for_only(self) -> Iterator[None]:
        """Runs nothing during a block that nobody waits for, however long it takes."""
        self._is_lazy = True
        try:
            yield
        finally:
            self._is_lazy = False

    def draw(self) -> int:
        """Returns a seed for a kernel."""
        with self.lock:
            return self._random.getrandbits(63) | 1

    def issue(self, queue: Queue, run: Callable[[], None], is_ready: Callable[[], bool] = always) -> int:
        """Queues work and returns its number. The lock is held."""
        needs = dict(queue.clock)
        queue.issued += 1
        queue.waiting.append(Work(run, needs, is_ready, time.monotonic()))
        self._arrived.set()
        return queue.issued

    def order_by_default(self, queue: Queue) -> None:
        """Does what the default stream and blocking streams do to each other, before work is queued."""
        for other in list(self.queues.values()):
            is_ordered = (
                other.is_blocking and other.ptr != LEGACY
                if queue.ptr == LEGACY
                else queue.is_blocking and other.ptr == LEGACY
            )
            if is_ordered and other.gpu == queue.gpu:
                queue.wait_for({other: other.issued})

    def wait(self, moment: Mapping[Queue, int]) -> None:
        """Runs work until some work has run, and notes that the host knows it."""
        self.run(moment)
        self.observe(moment)

    def run(self, moment: Mapping[Queue, int]) -> None:
        """Runs work, also of other queues, until some work has run."""
        while not self.is_over(moment):
            with self._running:
                progressed = self.is_over(moment) or self._step(self._wanted(moment))
            if not progressed:
                time.sleep(0.0002)  # for another process

    def is_over(self, moment: Mapping[Queue, int]) -> bool:
        return all(queue.done >= number for queue, number in moment.items())

    def observe(self, moment: Mapping[Queue, int]) -> None:
        """Notes that the host knows of work that it has run."""
        with self.lock:
            for queue, number in moment.items():
                queue.observed = max(queue.observed, number)

    def everything(self) -> dict[Queue, int]:
        """Returns the newest work of every queue."""
        with self.lock:
            return {queue: queue.issued for queue in self.queues.values()}

    def drain(self) -> None:
        """Runs everything, although the host does not know about it."""
        moment = self.everything()
        while not self.is_over(moment):
            with self._running:
                progressed = self._step(None)
            if not progressed:
                time.sleep(0.0002)

    def close(self) -> None:
        self._is_closed = True
        self._arrived.set()
        self._background.join()

    def _wanted(self, moment: Mapping[Queue, int]) -> set[Queue]:
        """Returns the queues on which something is waited for, at times together with all others."""
        with self.lock:
            if self._random.random() < 0.5:
                return set(self.queues.values())
            wanted, found = set(), [queue for queue, number in moment.items() if queue.done < number]
            while found:
                queue = found.pop()
                if queue not in wanted:
                    wanted.add(queue)
                    heads = [queue.waiting[0]] if queue.waiting else []
                    found += [other for work in heads for other, number in work.needs.items() if other.done < number]
            return wanted

    def _step(self, among: Iterable[Queue] | None) -> bool:
        """Runs one piece of work, if any can run."""
        with self.lock:
            queues = self.queues.values() if among is None else among
            ready = [queue for queue in queues if queue.waiting and self._can_run(queue.waiting[0])]
            if not ready:
                return False
            queue = self._random.choice(sorted(ready, key=lambda each: each.ptr))
            work = queue.waiting[0]
        work.run()
        with self.lock:
            queue.waiting.popleft()
            queue.done += 1
        return True

    def _can_run(self, work: Work) -> bool:
        return all(queue.done >= number for queue, number in work.needs.items()) and work.is_ready()

    def _run_late(self) -> None:
        """Runs what nobody waits for, in the background."""
        while not self._is_closed:
            self._arrived.wait()
            time.sleep(self._patience)
            old = time.monotonic() - self._patience
            with self._running:
                while not self._is_lazy and self._has_old_work(old) and self._step(None):
                    pass
            with self.lock:
                if not any(queue.waiting for queue in self.queues.values()) and not self._is_closed:
                    self._arrived.clear()

    def _has_old_work(self, old: float) -> bool:
        with self.lock:
            return any(queue.waiting and queue.waiting[0].since < old for queue in self.queues.values())
