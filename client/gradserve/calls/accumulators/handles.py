"""Handles of accumulators of one tensor."""

from typing import Protocol

from gradserve.calls.accumulators.components import Components
from gradserve.calls.accumulators.wire import AccumulatorWire
from gradserve.calls.identity import RequestIds
from gradserve.results import AccumulatorHandle, AccumulatorKind, DenseSpec, SparseSpec
from gradserve.v1 import accumulator_pb2


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


def wire_of(handle: AccumulatorHandle, ids: RequestIds) -> AccumulatorWire:
    """Returns the operations on the accumulator of a handle."""
    ref = accumulator_pb2.AccumulatorRef(container=handle.container, name=handle.name, incarnation=handle.incarnation)
    spec = SparseSpec if handle.kind is AccumulatorKind.SPARSE else DenseSpec
    return AccumulatorWire(ref, Components.of_one_tensor(spec(handle.dtype)), ids)
