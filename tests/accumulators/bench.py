"""The accumulator core for tests: no socket, no thread, a clock of our own."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.factory import AccumulatorFactory
from gradserve_server.accumulators.gradient import Contribution, Gradient, OpenGradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import AccumulatorJournals
from gradserve_server.accumulators.ledger import Event
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.spec import (
    AccumulatorSpec,
    ComponentSpec,
)
from gradserve_server.accumulators.sums.round_sum import AverageMemory
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import Compute, InlineCompute
from gradserve_server.devices.device import Allocate
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import AbortedError
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.lifetimes import SHARED, Lifetime, Lifetimes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import ShareRules
from tests.journals import EventJournal, OneJournal

F32 = np.dtype(np.float32)
KEY = ResourceKey("test", "acc")
ID = RequestId("a", 7, b"content")


class Bench:
    """A registry with all that it needs, to be looked at."""

    def __init__(
        self,
        compute: Compute | None = None,
        limit: int = 1 << 40,
        bookkeeping: int = 1 << 40,
        journal: EventJournal[Event] | None = None,
        memory: Budget | None = None,
        average_memory: AverageMemory | None = None,
        reducer: Reducer | None = None,
        allocate: Allocate = np.empty,
        journals: AccumulatorJournals | None = None,
        clock: Callable[[], float] | None = None,
        lifetimes: Lifetimes | None = None,
        places: Callable[[HostPlace], Places] | None = None,
        wall_clock: Callable[[], int] = time.time_ns,
        member: Member | None = None,
        **limits: Any,
    ) -> None:
        self.now = 0.0
        clock = clock or (lambda: self.now)
        self.memory = memory or Budget(limit, "bytes of tensor memory", ShareRules())
        self.bookkeeping = Budget(bookkeeping, "bytes of bookkeeping", ShareRules())
        self.lifetimes = lifetimes or Lifetimes(clock, 60.0)
        host = HostPlace("cpu", reducer or Reducer(ForkJoin(1)), allocate, compute or InlineCompute(), self.memory)
        self.places = Places(host) if places is None else places(host)
        factory = AccumulatorFactory(
            places=self.places,
            make_average_memory=lambda: average_memory,
            bookkeeping=self.bookkeeping,
            limits=LimitsConfig(**limits),
            lifetimes=self.lifetimes,
            member=member,
        )
        self.registry = AccumulatorRegistry(
            factory,
            self.lifetimes,
            new_incarnation=map(str, itertools.count()).__next__,
            wall_clock=wall_clock,
            member=member,
            journals=journals if journal is None else cast(AccumulatorJournals, OneJournal(journal)),
        )

    def accumulator(
        self, *components: ComponentSpec, key: ResourceKey = KEY, lifetime: Lifetime = SHARED, **spec: Any
    ) -> Accumulator:
        parts = components or (ComponentSpec("", F32),)
        return self.registry.create(key, AccumulatorSpec(parts, **spec), lifetime)[0]


def gradient(*values: float) -> OpenGradient:
    return holding(np.array(values, np.float32))


def holding(values: np.ndarray) -> OpenGradient:
    return opened(Gradient({"": values}))


def opened(gradient: Gradient) -> OpenGradient:
    return lambda use: use(gradient)


async def apply(acc: Accumulator, *values: float, call: RequestId | None = None, **contribution: Any) -> Any:
    return await acc.apply(call, Contribution(**contribution), gradient(*values))


async def take(acc: Accumulator, num_required: int, call: RequestId | None = None, timeout: float | None = 5) -> Any:
    return await acc.take(call, num_required, timeout)


async def push_pull(
    acc: Accumulator,
    *values: float,
    num_required: int,
    call: RequestId | None = None,
    one_per_worker: bool = True,
    **contribution: Any,
) -> Any:
    return await acc.push_pull(
        call, Contribution(**contribution), gradient(*values), num_required, 5, one_per_worker=one_per_worker
    )


def value_of(average: Any) -> list[float]:
    return average.values[""].tolist()  # type: ignore[no-any-return]


class Left:
    """A gradient in the memory of a caller who leaves before it has been read."""

    def __init__(self) -> None:
        self.is_opened, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, use: Callable[[Gradient], Awaitable[Any]]) -> Any:
        self.is_opened.set()
        await self.may_go_on.wait()
        raise AbortedError("the caller has left", caller_left=True)


async def turns(count: int = 5) -> None:
    """Lets every task that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


class HeldCompute(InlineCompute):
    """Arithmetic that waits to be let go on."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run(self, num_bytes: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        await self.go_on.wait()
        return function(*args, **kwargs)


class FailingCompute(InlineCompute):
    failing = False

    async def run(self, num_bytes: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self.failing:
            raise MemoryError
        return await super().run(num_bytes, function, *args, **kwargs)
