"""Accumulators, called with `await`."""

from typing import TypeVar

from gradserve.calls.accumulators.models import GradientAccumulatorCalls
from gradserve.calls.accumulators.operations import (
    AccumulatorCalls,
    ConditionalAccumulatorCalls,
    OneTensorAccumulatorCalls,
    SparseConditionalAccumulatorCalls,
)
from gradserve.face import AsyncFace, awaiting
from gradserve.public_names import shown
from gradserve.results import AccumulatorHandle

KindT = TypeVar("KindT", bound=AccumulatorCalls)
OneTensorKindT = TypeVar("OneTensorKindT", bound=OneTensorAccumulatorCalls)


class Accumulator(AsyncFace[KindT]):
    """The base class of all accumulators."""

    @property
    def name(self) -> str:
        """The accumulator's name on the server."""
        return self._calls.name

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    num_accumulated = awaiting(AccumulatorCalls.num_accumulated)
    set_global_step = awaiting(AccumulatorCalls.set_global_step)
    info = awaiting(AccumulatorCalls.info)
    delete = awaiting(AccumulatorCalls.delete)


class _OneTensorAccumulator(Accumulator[OneTensorKindT]):
    """The base class of accumulators of one tensor."""

    @property
    def accumulator_ref(self) -> AccumulatorHandle:
        """The accumulator's handle, for the ops of `RawOps` of this client and of others."""
        return self._calls.accumulator_ref


class ConditionalAccumulator(_OneTensorAccumulator[ConditionalAccumulatorCalls]):
    """TensorFlow's ConditionalAccumulator, served: averages dense gradients of one tensor.

    Made by `Client.conditional_accumulator`.
    """

    apply_grad = awaiting(ConditionalAccumulatorCalls.apply_grad)
    take_grad = awaiting(ConditionalAccumulatorCalls.take_grad)
    read_average = awaiting(ConditionalAccumulatorCalls.read_average)


class SparseConditionalAccumulator(_OneTensorAccumulator[SparseConditionalAccumulatorCalls]):
    """TensorFlow's SparseConditionalAccumulator, served: averages sparse gradients of one tensor.

    Made by `Client.sparse_conditional_accumulator`.
    """

    apply_grad = awaiting(SparseConditionalAccumulatorCalls.apply_grad)
    apply_indexed_slices_grad = awaiting(SparseConditionalAccumulatorCalls.apply_indexed_slices_grad)
    take_grad = awaiting(SparseConditionalAccumulatorCalls.take_grad)
    take_indexed_slices_grad = take_grad
    read_average = awaiting(SparseConditionalAccumulatorCalls.read_average)


class GradientAccumulator(Accumulator[GradientAccumulatorCalls]):
    """Averages the gradients of a whole model: several named components, applied and counted as one.

    Made by `Client.gradient_accumulator`.
    """

    apply_grad = awaiting(GradientAccumulatorCalls.apply_grad)
    take_grad = awaiting(GradientAccumulatorCalls.take_grad)
    read_average = awaiting(GradientAccumulatorCalls.read_average)
    push_pull = awaiting(GradientAccumulatorCalls.push_pull)
