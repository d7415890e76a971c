"""One server's shard of an accumulator, without a server."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Average, Gradient, RoundParts
from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.places.place import HostPlace
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout, PartialShape, Reduction
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import AbortedError
from gradserve_server.resources.budget import Budget
from tests.accumulators.bench import F32, Left, opened, turns

P = ParamSpec("P")
T = TypeVar("T")
HOME = "0" * 31 + "1"
SPEC = AccumulatorSpec((ComponentSpec("w", F32, PartialShape((4,)), Layout.DENSE),), Reduction.MEAN, deterministic=True)


class _Held(InlineCompute):
    """Holds the next piece of work until it may go on."""

    def __init__(self) -> None:
        self.holds_next = False
        self.is_held, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self.holds_next:
            self.holds_next = False
            self.is_held.set()
            await self.may_go_on.wait()
        return function(*args, **kwargs)


def shard_with(compute: InlineCompute, budget: Budget) -> Shard:
    place = HostPlace("cpu", Reducer(ForkJoin(1)), np.empty, compute, budget)

    def make_sum() -> RoundSum:
        return RoundSum(SPEC, place, memory=budget.reserve())

    return Shard(
        "a",
        SPEC,
        make_sum=make_sum,
        make_running_sum=None,
        memory=budget.reserve(),
        bookkeeping=budget.reserve(),
        journal=None,
    )


async def test_a_gradient_comes_again_right_when_its_first_caller_has_left() -> None:
    shard, left = shard_with(InlineCompute(), Budget(1 << 40, "bytes")), Left()
    first = asyncio.create_task(shard.stage(PartKey(HOME, "0"), 0, left, epoch=0))
    await left.is_opened.wait()
    await turns()
    left.may_go_on.set()
    # Its first step comes when the task of the other has ended, and before anybody has been told.
    values = opened(Gradient({"w": np.ones(4, np.float32)}))
    second = asyncio.create_task(shard.stage(PartKey(HOME, "0"), 0, values, epoch=0))
    with pytest.raises(AbortedError, match="has left"):
        await first
    assert not await second
    assert shard.num_parts == 1


async def test_a_round_that_is_over_while_it_is_reduced_is_reduced_to_its_end() -> None:
    compute, budget = _Held(), Budget(1 << 40, "bytes")
    shard = shard_with(compute, budget)
    for step in (0, 1):
        values = {"w": np.full(4, step + 1, np.float32)}
        await shard.stage(PartKey(HOME, str(step)), step, opened(Gradient(values)), epoch=0)
    compute.holds_next = True
    first = asyncio.create_task(shard.reduce(decided(0)))
    await compute.is_held.wait()
    second = await shard.reduce(decided(1))
    compute.may_go_on.set()
    for step, average in enumerate((await first, second)):
        value = average.values["w"]
        assert isinstance(value, np.ndarray)
        assert value.tolist() == [step + 1] * 4
    assert shard.num_parts == 0
    shard.close(AbortedError("it was deleted"))
    assert budget.used == 0


def decided(number: int) -> Average:
    """Returns what the home says of a round with one gradient, of the step with the number of the round."""
    parts = RoundParts(HOME, (str(number),), (1.0,), oldest_round=number, oldest_step=number)
    return Average({}, number + 1, number, 1, 1.0, (), parts=parts)
