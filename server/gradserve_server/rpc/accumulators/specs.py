"""Converts specs and descriptions of accumulators to messages, and back."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve.v1 import accumulator_pb2, tensor_pb2
from gradserve.wire.tensors import to_data_type, to_dtype
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.incoming import components_named
from gradserve_server.accumulators.rounds import AccumulatorState
from gradserve_server.accumulators.spec import (
    AccumulatorSpec,
    ComponentSpec,
    Layout,
    PartialShape,
    Piece,
    Reduction,
    check_agreement,
)
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import (
    MAX_COMPONENT_DIMENSIONS,
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    check_count,
    check_length,
)
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.boundary.fields import decode_durability, encode_durability, encode_idle_lease
from gradserve_server.rpc.boundary.messages import repeated, within
from gradserve_server.security.identity import ANONYMOUS, Identity

_REDUCTIONS = {
    accumulator_pb2.REDUCTION_UNSPECIFIED: Reduction.MEAN,
    accumulator_pb2.REDUCTION_MEAN: Reduction.MEAN,
    accumulator_pb2.REDUCTION_SUM: Reduction.SUM,
}
_LAYOUTS = {
    accumulator_pb2.LAYOUT_UNSPECIFIED: Layout.DENSE,
    accumulator_pb2.LAYOUT_DENSE: Layout.DENSE,
    accumulator_pb2.LAYOUT_SPARSE: Layout.SPARSE,
}
_REDUCTION_CODES = {
    Reduction.MEAN: accumulator_pb2.REDUCTION_MEAN,
    Reduction.SUM: accumulator_pb2.REDUCTION_SUM,
}
_LAYOUT_CODES = {
    Layout.DENSE: accumulator_pb2.LAYOUT_DENSE,
    Layout.SPARSE: accumulator_pb2.LAYOUT_SPARSE,
}


def decode_key(ref: accumulator_pb2.AccumulatorRef, user: Identity = ANONYMOUS) -> ResourceKey:
    """Returns the key of an accumulator that somebody names."""
    return ResourceKey(ref.container or DEFAULT_CONTAINER, ref.name, user)


def decode_accumulator_spec(spec: accumulator_pb2.AccumulatorSpec) -> AccumulatorSpec:
    """Reads the spec of an accumulator.

    Raises:
        InvalidArgumentError: It is not a valid spec.
    """
    check_count(spec.components, MAX_COMPONENTS, "components", "spec.components")
    num_dimensions = sum([len(component.shape.dims) for component in spec.components])
    if num_dimensions > MAX_COMPONENT_DIMENSIONS:
        raise InvalidArgumentError(
            f"expected at most {MAX_COMPONENT_DIMENSIONS} dimensions in all, got {num_dimensions}",
            field="spec.components",
        )
    num_pieces = sum([len(component.pieces) for component in spec.components])
    if num_pieces > MAX_COMPONENT_DIMENSIONS:
        raise InvalidArgumentError(
            f"expected at most {MAX_COMPONENT_DIMENSIONS} pieces in all, got {num_pieces}", field="spec.components"
        )
    if spec.reduction not in _REDUCTIONS:
        raise InvalidArgumentError(f"expected a known reduction, got {spec.reduction}", field="spec.reduction")
    durability = decode_durability(spec.durability, "spec.durability")
    check_length(spec.device, MAX_NAME_BYTES, "spec.device")
    check_agreement(spec.agreement)
    with components_named("spec.components", spec.components):
        return AccumulatorSpec(
            components=tuple(
                _decode_component(component, f"spec.components[{index}]")
                for index, component in enumerate(spec.components)
            ),
            reduction=_REDUCTIONS[spec.reduction],
            accumulate_dtype=(
                _decode_dtype(spec.accumulate_dtype, "spec.accumulate_dtype") if spec.accumulate_dtype else None
            ),
            deterministic=spec.deterministic,
            keep_averages=spec.keep_averages or 1,
            one_per_worker=spec.one_per_worker,
            refuse_non_finite=spec.refuse_non_finite,
            durability=durability,
            device=spec.device or None,
            agreement=dict(spec.agreement),
            num_shards=spec.num_shards,
        )


def _decode_component(component: accumulator_pb2.ComponentSpec, field: str) -> ComponentSpec:
    check_length(component.name, MAX_NAME_BYTES, f"{field}.name")
    check_count(component.shape.dims, MAX_DIMENSIONS, "dimensions", f"{field}.shape.dims")
    if component.layout not in _LAYOUTS:
        raise InvalidArgumentError(f"expected a known layout, got {component.layout}", field=f"{field}.layout")
    shape = PartialShape()
    if component.HasField("shape") and not component.shape.unknown_rank:
        shape = PartialShape(tuple(component.shape.dims))
    elif component.shape.dims:
        raise InvalidArgumentError(
            f"expected no dims with unknown_rank, got {list(component.shape.dims)}", field=f"{field}.shape.dims"
        )
    return ComponentSpec(
        component.name,
        _decode_dtype(component.dtype, f"{field}.dtype"),
        shape,
        _LAYOUTS[component.layout],
        tuple([Piece(each.server, each.num_rows) for each in component.pieces]),
    )


def _decode_dtype(data_type: tensor_pb2.DataType, field: str) -> np.dtype[Any]:
    try:
        return to_dtype(data_type)
    except ValueError as error:
        raise InvalidArgumentError(str(error), field=field) from None


def _encode_component(component: ComponentSpec) -> accumulator_pb2.ComponentSpec:
    return accumulator_pb2.ComponentSpec(
        name=component.name,
        dtype=to_data_type(component.dtype),
        shape=accumulator_pb2.PartialShape(unknown_rank=component.shape.dims is None, dims=component.shape.dims),
        layout=_LAYOUT_CODES[component.layout],
        pieces=[accumulator_pb2.Piece(server=each.server, num_rows=each.num_rows) for each in component.pieces],
    )


def _without_components(accumulator: Accumulator) -> accumulator_pb2.AccumulatorSpec:
    """Returns the message of a spec, with every field set but the components."""
    spec = accumulator.spec
    return accumulator_pb2.AccumulatorSpec(
        reduction=_REDUCTION_CODES[spec.reduction],
        accumulate_dtype=None if spec.accumulate_dtype is None else to_data_type(spec.accumulate_dtype),
        deterministic=spec.deterministic,
        keep_averages=spec.keep_averages,
        one_per_worker=spec.one_per_worker,
        refuse_non_finite=spec.refuse_non_finite,
        durability=encode_durability(spec.durability),
        device=accumulator.place.name,
        agreement=spec.agreement,
        num_shards=spec.num_shards,
    )


@dataclass(frozen=True)
class ServerId:
    """What descriptions say of the server that they come from.

    Attributes:
        incarnation: The id of this run of it.
        member: Its place in a cluster, as `Member.text`; empty if it is in none.
    """

    incarnation: str
    member: str


def num_parts(accumulator: Accumulator) -> int:
    """Returns the number of parts that the message of an accumulator has."""
    return len(accumulator.rounds.members.workers) + accumulator.spec.num_parts + 2 * len(accumulator.spec.agreement)


def encode_info(
    server: ServerId, key: ResourceKey, accumulator: Accumulator, state: AccumulatorState, lifetime: Lifetime
) -> accumulator_pb2.AccumulatorInfo:
    """Returns the state of an accumulator of this server as a message. Can run in any thread."""
    info = _without_spec(server, key, accumulator, state, lifetime)
    info.spec.CopyFrom(_without_components(accumulator))
    info.spec.components.extend(map(_encode_component, accumulator.spec.components))
    return info


def serialize_info(
    server: ServerId, key: ResourceKey, accumulator: Accumulator, state: AccumulatorState, lifetime: Lifetime
) -> bytes:
    """Returns what `encode_info` does, serialized, for any number of components."""
    spec = accumulator.spec
    parts = repeated(
        map(_encode_component, spec.components), lambda some: accumulator_pb2.AccumulatorSpec(components=some)
    )
    rest = _without_components(accumulator).SerializeToString()
    info = _without_spec(server, key, accumulator, state, lifetime).SerializeToString()
    return info + within(accumulator_pb2.AccumulatorInfo, "spec", [rest, *parts])


def _without_spec(
    server: ServerId, key: ResourceKey, accumulator: Accumulator, state: AccumulatorState, lifetime: Lifetime
) -> accumulator_pb2.AccumulatorInfo:
    return accumulator_pb2.AccumulatorInfo(
        accumulator=accumulator_pb2.AccumulatorRef(
            container=key.container, name=key.name, incarnation=accumulator.incarnation, member=server.member
        ),
        global_step=state.global_step,
        num_accumulated=state.num_accumulated,
        num_waiting=state.num_waiting,
        num_bytes=state.num_bytes,
        worker_ids=state.worker_ids,
        kept_steps=state.kept_steps,
        is_private=bool(lifetime.owner),
        idle_lease=encode_idle_lease(lifetime),
        server_incarnation=server.incarnation,
        epoch=state.epoch,
    )
