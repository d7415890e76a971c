"""Decodes the requests of AccumulatorService: names, specs, gradients with the ids of their calls, decided rounds."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradserve_protocol.tensors import to_dtype
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, parameters_messages_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Average, Contribution, RoundParts
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import IncomingGradient, components_named
from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.sharding.home import NUM_BYTES, part_id
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
    MAX_UNANSWERED,
    MAX_WORKER_ID_BYTES,
    check_count,
    check_length,
)
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.accumulators.gradients import (
    contribution_of,
    decode_request_id,
    digest_of,
    gradient_id,
    incoming_gradient,
    serialized,
    summands_of,
)
from gradserve_server.rpc.boundary.fields import decode_durability
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.payload import Payload

# Names and specs

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


_COMPONENTS_FIELD = "spec.components"


def decode_key(ref: accumulator_pb2.AccumulatorRef, user: Identity = ANONYMOUS) -> ResourceKey:
    """Returns the key of an accumulator that somebody names."""
    return ResourceKey(ref.container or DEFAULT_CONTAINER, ref.name, user)


def decode_accumulator_spec(spec: accumulator_pb2.AccumulatorSpec) -> AccumulatorSpec:
    """Reads the spec of an accumulator.

    Raises:
        InvalidArgumentError: It is not a valid spec.
    """
    check_component_counts(spec.components)
    if spec.reduction not in _REDUCTIONS:
        raise InvalidArgumentError(f"expected a known reduction, got {spec.reduction}", field="spec.reduction")
    durability = decode_durability(spec.durability, "spec.durability")
    check_length(spec.device, MAX_NAME_BYTES, "spec.device")
    check_agreement(spec.agreement)
    with components_named(_COMPONENTS_FIELD, spec.components):
        return AccumulatorSpec(
            components=decode_components(spec.components),
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


def check_component_counts(components: Sequence[accumulator_pb2.ComponentSpec]) -> None:
    """Checks the number of components in a spec, and of their dimensions and pieces.

    Raises:
        InvalidArgumentError: There are too many.
    """
    check_count(components, MAX_COMPONENTS, "components", _COMPONENTS_FIELD)
    for what, num_parts in (
        ("dimensions", sum([len(component.shape.dims) for component in components])),
        ("pieces", sum([len(component.pieces) for component in components])),
    ):
        if num_parts > MAX_COMPONENT_DIMENSIONS:
            raise InvalidArgumentError(
                f"expected at most {MAX_COMPONENT_DIMENSIONS} {what} in all, got {num_parts}", field=_COMPONENTS_FIELD
            )


def decode_components(components: Sequence[accumulator_pb2.ComponentSpec]) -> tuple[ComponentSpec, ...]:
    """Reads the components of a spec.

    Raises:
        InvalidArgumentError: One is not valid.
    """
    return tuple(
        _decode_component(component, f"{_COMPONENTS_FIELD}[{index}]") for index, component in enumerate(components)
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


# Gradients

GradientRequest = messages_pb2.ApplyGradientRequest | messages_pb2.PushPullRequest


_WithGradient = GradientRequest | messages_pb2.StageGradientRequest


def decode_gradient(
    request: GradientRequest, payload: Payload, user: Identity = ANONYMOUS
) -> tuple[RequestId | None, Contribution, IncomingGradient]:
    """Reads the id of a gradient's call, its step, weight and sender, and its components.

    Raises:
        InvalidArgumentError: It has too many parts, or an id is not valid.
    """
    contribution = _contribution(request, user)
    given = incoming_gradient(request.gradient, payload, user, release=request.release_handles)
    return _gradient_id(request, contribution, given, user), contribution, given


def decode_staged(
    request: messages_pb2.StageGradientRequest, payload: Payload, user: Identity = ANONYMOUS
) -> tuple[PartKey, Sequence[PartKey], IncomingGradient]:
    """Reads the name of a gradient that is to be held for a round, those that its client withdraws, and its components.

    Raises:
        InvalidArgumentError: It has too many parts, or no name.
    """
    check_count(request.withdrawn, MAX_UNANSWERED, "numbers", "withdrawn")
    call = decode_request_id(request.request_id, b"", user)
    key, *withdrawn = [
        PartKey(request.home_incarnation, part_id(RequestId(call.client_id, sequence)))
        for sequence in (call.sequence, *request.withdrawn)
    ]
    return key, withdrawn, incoming_gradient(request.gradient, payload, user, release=request.release_handles)


def decode_take_id(request: messages_pb2.TakeGradientRequest, user: Identity = ANONYMOUS) -> RequestId | None:
    """Returns the id of a take, None if it has none."""
    if not request.HasField("request_id"):
        return None
    return decode_request_id(request.request_id, b"take %d" % request.num_required, user)


def decode_read_id(request: messages_pb2.ReadAverageRequest, user: Identity = ANONYMOUS) -> RequestId | None:
    """Returns the id of a read, None if it has none."""
    return decode_request_id(request.request_id, b"", user) if request.HasField("request_id") else None


def epoch_of(request: _WithGradient) -> int | None:
    """Returns the epoch of a gradient for a sharded accumulator; None if the request does not say."""
    return request.epoch if request.HasField("epoch") else None


def counts_one_per_worker(request: messages_pb2.PushPullRequest) -> bool:
    """Returns True if a push_pull counts only the first gradient of its worker, which is the default."""
    return request.one_per_worker if request.HasField("one_per_worker") else True


def _contribution(request: GradientRequest, user: Identity) -> Contribution:
    return contribution_of(
        request,
        was_accepted=isinstance(request, messages_pb2.ApplyGradientRequest) and request.accepted_before,
        sum_of=summands_of(request, user) if request.sum_of else (),
        epoch=epoch_of(request),
        digest=digest_of(request, request.worker_id, "parameters_digest") if request.parameters_digest else b"",
    )


def _gradient_id(
    request: GradientRequest, contribution: Contribution, given: IncomingGradient, user: Identity
) -> RequestId | None:
    """Returns the id of an apply or push_pull, None if it has none."""
    if not request.HasField("request_id"):
        return None
    pull = None
    if isinstance(request, messages_pb2.PushPullRequest):
        pull = (request.num_required, counts_one_per_worker(request))
    what = (type(request).__name__, pull, request.local_step, contribution.factor, request.worker_id)
    summands = serialized(request.sum_of) if request.sum_of else ()
    return gradient_id(request.request_id, what, given, user, unread=request.unread_contents, more=summands)


# Decided rounds

_PARTS_FIELD = "average.parts"


def decode_counted(
    request: messages_pb2.ForgetGradientsRequest | parameters_messages_pb2.ForgetUpdatesRequest,
) -> frozenset[str]:
    """Returns the ids of the gradients that a home has counted.

    Raises:
        InvalidArgumentError: They are no such ids.
    """
    check_ids(request.part_ids, "part_ids")
    return frozenset([each.hex() for each in request.part_ids])


def decode_decided(average: accumulator_pb2.Average) -> Average:
    """Returns an average of a sharded accumulator as its home has answered it: without values.

    Raises:
        InvalidArgumentError: It is not such an average.
    """
    if not average.HasField("parts"):
        raise InvalidArgumentError("expected what the home has answered, got no parts", field=_PARTS_FIELD)
    parts = average.parts
    ids = tuple([each.hex() for each in parts.part_ids])
    if not ids or len(ids) != len(parts.weights) or len(set(ids)) < len(ids):
        raise InvalidArgumentError(
            f"expected different ids with a weight each, got {len(ids)} ids, {len(set(ids))} different ones, and "
            f"{len(parts.weights)} weights",
            field=f"{_PARTS_FIELD}.part_ids",
        )
    check_ids(parts.part_ids, f"{_PARTS_FIELD}.part_ids")
    if any(not 0 <= place < len(ids) for place in parts.sums) or len(set(parts.sums)) < len(parts.sums):
        raise InvalidArgumentError(
            f"expected different places of {len(ids)} ids, got {list(parts.sums)[:10]}", field=f"{_PARTS_FIELD}.sums"
        )
    for weight in parts.weights:
        if not 0 < weight < float("inf"):
            raise InvalidArgumentError(
                f"expected positive, finite weights, got {weight:g}", field=f"{_PARTS_FIELD}.weights"
            )
    for worker_id in average.worker_ids:
        check_length(worker_id, MAX_WORKER_ID_BYTES, "average.worker_ids")
    return Average(
        values={},
        step=average.step,
        round_number=average.round - 1,
        num_gradients=average.num_gradients,
        total_weight=average.total_weight,
        worker_ids=tuple(average.worker_ids),
        parts=RoundParts(
            parts.home_incarnation,
            ids,
            tuple(parts.weights),
            oldest_round=parts.oldest_round - 1,
            oldest_step=parts.oldest_step,
            sums=tuple(parts.sums),
            epoch=parts.epoch,
            oldest_epoch=parts.oldest_epoch,
        ),
    )


def check_ids(ids: Iterable[bytes], field: str) -> None:
    """Checks ids of staged gradients.

    Raises:
        InvalidArgumentError: One has another length.
    """
    for each in ids:
        if len(each) != NUM_BYTES:
            raise InvalidArgumentError(f"expected ids of {NUM_BYTES} bytes, got one of {len(each)}", field=field)
