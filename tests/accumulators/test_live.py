"""Gradients in memory that a client can change at any time."""

import gc
import weakref
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.accumulators.gradient import Array, Contribution, Gradient, OpenGradient, SparseSlices
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import GradientReceiver
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.accumulators.spec import ComponentSpec, Layout, PartialShape
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.incoming import TensorOpener, tensors_in
from gradserve_server.tensors.payload import Payload, PayloadSegment
from gradserve_server.tensors.spec import TensorSpec
from tests.accumulators.bench import F32, Bench, opened, take
from tests.accumulators.gradients import gradient_of
from tests.tensors.test_leases import World

WORKER = Contribution(worker_id="w")

each_order = pytest.mark.parametrize("deterministic", [False, True], ids=["arrival", "worker"])
each_check = pytest.mark.parametrize("refuse_non_finite", [False, True], ids=["unchecked", "checked"])


class Scribbler(InlineCompute):
    """Overwrites an array as soon as something was computed."""

    def __init__(self) -> None:
        self.array: Array | None = None
        self.most_used = 0
        self.bench: Bench | None = None

    async def run(self, num_bytes: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = await super().run(num_bytes, function, *args, **kwargs)
        if self.array is not None:
            self.array[...] = np.nan
        if self.bench is not None:
            self.most_used = max(self.most_used, self.bench.memory.used)
        return result


def live(array: Array, *, owned: bool = False) -> OpenGradient:
    return opened(Gradient({"": array}, owned=owned, live=True))


@each_order
@each_check
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
async def test_what_is_written_after_the_call_does_not_count(
    dtype: Any, *, deterministic: bool, refuse_non_finite: bool, owned: bool
) -> None:
    bench = Bench()
    acc = bench.accumulator(
        ComponentSpec("", np.dtype(dtype)), deterministic=deterministic, refuse_non_finite=refuse_non_finite
    )
    region = np.empty(4, dtype)
    for value in (1, 2, 6):
        region[...] = value
        await acc.apply(None, WORKER, live(region, owned=owned))
        region[...] = np.nan
    average, _ = await take(acc, 3)
    assert average.values[""].tolist() == [3] * 4
    assert np.isnan(region).all()
    assert region.flags.writeable
    assert bench.memory.used == region.nbytes


@each_order
@each_check
async def test_nothing_refers_to_it_after_the_call(*, deterministic: bool, refuse_non_finite: bool) -> None:
    acc = Bench().accumulator(deterministic=deterministic, refuse_non_finite=refuse_non_finite)
    for _ in range(2):
        region = np.ones(4, np.float32)
        alive = weakref.ref(region)
        await acc.apply(None, WORKER, live(region, owned=True))
        del region
        gc.collect()
        assert alive() is None


@each_order
async def test_the_check_cannot_be_deceived(*, deterministic: bool) -> None:
    compute = Scribbler()
    acc = Bench(compute).accumulator(deterministic=deterministic, refuse_non_finite=True)
    for value in (1, 3):
        compute.array = np.full(4, value, np.float32)
        await acc.apply(None, WORKER, live(compute.array))
        assert np.isnan(compute.array).all()
    compute.array = None
    assert (await take(acc, 2))[0].values[""].tolist() == [2] * 4


@each_order
async def test_what_is_not_finite_is_refused(*, deterministic: bool) -> None:
    bench = Bench()
    acc = bench.accumulator(deterministic=deterministic, refuse_non_finite=True)
    with pytest.raises(InvalidArgumentError, match=r"expected finite values, got inf at \[1\]"):
        await acc.apply(None, WORKER, live(np.array([1, np.inf], np.float32)))
    assert (acc.num_accumulated, bench.memory.used) == (0, 0)


async def test_copies_for_the_check_are_counted_and_become_the_sum() -> None:
    compute = Scribbler()
    bench = compute.bench = Bench(compute)
    acc = bench.accumulator(refuse_non_finite=True)
    for expected in (16, 32):
        compute.most_used = 0
        await acc.apply(None, WORKER, live(np.ones(4, np.float32)))
        assert compute.most_used == expected
        assert bench.memory.used == acc.state.num_bytes == 16


async def test_copies_that_are_held_are_counted() -> None:
    bench = Bench()
    acc = bench.accumulator(deterministic=True)
    for number in (1, 2):
        await acc.apply(None, WORKER, live(np.ones(4, np.float32), owned=True))
        assert bench.memory.used == acc.state.num_bytes == 16 * number


@each_order
@each_check
async def test_refused_when_memory_is_short(*, deterministic: bool, refuse_non_finite: bool) -> None:
    bench = Bench(limit=15)
    acc = bench.accumulator(deterministic=deterministic, refuse_non_finite=refuse_non_finite)
    with pytest.raises(ResourceExhaustedError, match="16 asked for, 0 in use, 15 allowed"):
        await acc.apply(None, WORKER, live(np.ones(4, np.float32), owned=True))
    assert (acc.num_accumulated, bench.memory.used) == (0, 0)


@each_order
async def test_sparse_components_beside(*, deterministic: bool) -> None:
    bench = Bench()
    acc = bench.accumulator(
        ComponentSpec("w", F32),
        ComponentSpec("e", F32, PartialShape((4, 1)), Layout.SPARSE),
        deterministic=deterministic,
        refuse_non_finite=True,
    )
    region = np.ones(2, np.float32)
    rows = SparseSlices(np.array([1]), np.full((1, 1), 5, np.float32))
    for _ in range(2):
        gradient = Gradient({"e": rows, "w": region}, live=True)
        await acc.apply(None, WORKER, opened(gradient))
    assert bench.memory.used == acc.state.num_bytes
    average, _ = await take(acc, 2)
    assert average.values["w"].tolist() == [1, 1]
    assert average.values["e"].values.tolist() == [[5]]
    assert average.values["w"] is not region


async def test_other_dtypes_beside_are_converted() -> None:
    acc = Bench().accumulator(ComponentSpec("a", F32), ComponentSpec("b", F32), refuse_non_finite=True)
    region, stored = np.ones(2, np.float32), np.full(2, 3.0)
    gradient = Gradient({"a": region, "b": stored}, live=True)
    await acc.apply(None, WORKER, opened(gradient))
    region[...] = np.nan
    average, _ = await take(acc, 1)
    assert {name: value.tolist() for name, value in average.values.items()} == {"a": [1, 1], "b": [3, 3]}


@pytest.mark.parametrize("has_left", [False, True])
async def test_what_is_not_valid_may_be_what_a_caller_that_has_left_wrote(*, has_left: bool) -> None:
    """The same call, sent again while the first is under way, then brings the gradient itself."""
    acc = Bench().accumulator(ComponentSpec("", F32, PartialShape((4, 1)), Layout.SPARSE))
    memory, ones = np.zeros(128, np.uint8), np.ones((1, 1), np.float32)
    payload = Payload([PayloadSegment(0, memory, is_live=True)], None, has_left=lambda: has_left)
    places = [("indices", TensorSpec(np.dtype(np.int64), (1,)), 0), ("values", TensorSpec(F32, (1, 1)), 64)]
    indices, values = tensors_in(payload, places)
    given = gradient_of({"": (indices, values)}, payload)
    memory[:] = 0xFF
    host = CpuDevice(BufferPool(0))
    opener = TensorOpener(World().store, Residence(host, host, InlineCompute()), InlineCompute())
    receiver = GradientReceiver(opener, InlineCompute(), Reducer(ForkJoin(1)))
    call = RequestId("client", 1, b"")
    applied = acc.apply(call, WORKER, partial(receiver.open, acc.sum_spec, acc.place, given))
    error, message = (AbortedError, "the caller has left") if has_left else (InvalidArgumentError, "got -1 at 0")
    with pytest.raises(error, match=message):
        await applied
    rows = SparseSlices(np.array([1]), ones)
    outcome, duplicate = await acc.apply(call, WORKER, opened(Gradient({"": rows})))
    assert (outcome.outcome, duplicate) == (Outcome.ACCEPTED, False)
