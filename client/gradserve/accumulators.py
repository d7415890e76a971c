"""Accumulators, called from blocking code. `gradserve.aio` has the same with `await`."""

from typing import TypeVar

from gradserve.calls.accumulators.models import GradientAccumulatorCalls
from gradserve.calls.accumulators.operations import (
    AccumulatorCalls,
    ConditionalAccumulatorCalls,
    OneTensorAccumulatorCalls,
    SparseConditionalAccumulatorCalls,
)
from gradserve.face import BlockingFace, blocking
from gradserve.public_names import shown
from gradserve.results import AccumulatorHandle

KindT = TypeVar("KindT", bound=AccumulatorCalls)
OneTensorKindT = TypeVar("OneTensorKindT", bound=OneTensorAccumulatorCalls)


class Accumulator(BlockingFace[KindT]):
    """The base class of all accumulators."""

    @property
    def name(self) -> str:
        """The accumulator's name on the server."""
        return self._calls.name

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    num_accumulated = blocking(AccumulatorCalls.num_accumulated)
    set_global_step = blocking(AccumulatorCalls.set_global_step)
    info = blocking(AccumulatorCalls.info)
    delete = blocking(AccumulatorCalls.delete)


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

    apply_grad = blocking(ConditionalAccumulatorCalls.apply_grad)
    take_grad = blocking(ConditionalAccumulatorCalls.take_grad)
    read_average = blocking(ConditionalAccumulatorCalls.read_average)


class SparseConditionalAccumulator(_OneTensorAccumulator[SparseConditionalAccumulatorCalls]):
    """TensorFlow's SparseConditionalAccumulator, served: averages sparse gradients of one tensor.

    Made by `Client.sparse_conditional_accumulator`.
    """

    apply_grad = blocking(SparseConditionalAccumulatorCalls.apply_grad)
    apply_indexed_slices_grad = blocking(SparseConditionalAccumulatorCalls.apply_indexed_slices_grad)
    take_grad = blocking(SparseConditionalAccumulatorCalls.take_grad)
    take_indexed_slices_grad = take_grad
    read_average = blocking(SparseConditionalAccumulatorCalls.read_average)


class GradientAccumulator(Accumulator[GradientAccumulatorCalls]):
    """Averages the gradients of a whole model: several named components, applied and counted as one.

    Made by `Client.gradient_accumulator`.
    """

    apply_grad = blocking(GradientAccumulatorCalls.apply_grad)
    take_grad = blocking(GradientAccumulatorCalls.take_grad)
    read_average = blocking(GradientAccumulatorCalls.read_average)
    push_pull = blocking(GradientAccumulatorCalls.push_pull)
