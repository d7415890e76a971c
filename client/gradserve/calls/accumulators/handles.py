"""Handles of accumulators of one tensor."""

from typing import Protocol

from gradserve.calls.accumulators.wire import AccumulatorWire
from gradserve.results import AccumulatorHandle, AccumulatorKind


class HasAccumulatorRef(Protocol):
    """An accumulator of one tensor: a ConditionalAccumulator or a SparseConditionalAccumulator."""

    @property
    def accumulator_ref(self) -> AccumulatorHandle:
        """The accumulator's handle."""
        ...


def handle_of(wire: AccumulatorWire) -> AccumulatorHandle:
    """Returns the handle of an accumulator of one tensor."""
    (component,) = wire.components
    kind = AccumulatorKind.SPARSE if component.is_sparse else AccumulatorKind.DENSE
    return AccumulatorHandle(wire.ref.container, wire.ref.name, wire.ref.incarnation, component.dtype, kind)
