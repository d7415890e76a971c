"""The handles of accumulators of one tensor."""

from typing import Protocol

from gradserve.calls.accumulator_wire import AccumulatorWire
from gradserve.calls.identity import RequestIds
from gradserve.results import AccumulatorHandle, AccumulatorKind, DenseSpec, SparseSpec
from gradserve.v1 import accumulator_pb2
from gradserve.wire.dtypes import parse_dtype

_COMPONENT = ""
"""How the only component is called."""


class HasAccumulatorRef(Protocol):
    """An accumulator of one tensor: a ConditionalAccumulator or a SparseConditionalAccumulator."""

    @property
    def accumulator_ref(self) -> AccumulatorHandle:
        """Its handle."""
        ...


def handle_of(wire: AccumulatorWire) -> AccumulatorHandle:
    """Returns the handle of an accumulator of one tensor."""
    (spec,) = wire.components.values()
    kind = AccumulatorKind.SPARSE if isinstance(spec, SparseSpec) else AccumulatorKind.DENSE
    return AccumulatorHandle(wire.ref.container, wire.ref.name, wire.ref.incarnation, parse_dtype(spec.dtype), kind)


def wire_of(handle: AccumulatorHandle, ids: RequestIds) -> AccumulatorWire:
    """Returns the exchanges on the accumulator of a handle."""
    ref = accumulator_pb2.AccumulatorRef(container=handle.container, name=handle.name, incarnation=handle.incarnation)
    spec = SparseSpec if handle.kind is AccumulatorKind.SPARSE else DenseSpec
    return AccumulatorWire(ref, {_COMPONENT: spec(handle.dtype)}, ids)
