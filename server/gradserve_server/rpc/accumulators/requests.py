"""Decodes the requests of AccumulatorService: names, specs, gradients with the ids of their calls, decided rounds."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from gradserve_protocol.tensors import to_data_type, to_dtype
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Average, Contribution, RoundParts, Summand, sum_of_weights
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import IncomingComponent, IncomingGradient, components_named
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
    MAX_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_SUMMANDS,
    MAX_UNANSWERED,
    MAX_WORKER_ID_BYTES,
    check_count,
    check_length,
)
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.boundary.fields import decode_durability
from gradserve_server.rpc.tensors.messages import decode_tensors
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.incoming import IncomingTensor
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


# Gradients

GradientRequest = messages_pb2.ApplyGradientRequest | messages_pb2.PushPullRequest


_WithGradient = GradientRequest | messages_pb2.StageGradientRequest


_SUMMARY_BYTES = 4096


_LONGEST_CONTENTS = 3 << 20
"""The most bytes whose contents tell calls apart. A larger gradient may arrive beside the message, and again as an
upload, of which only dtypes and shapes are known."""


def decode_gradient(
    request: GradientRequest, payload: Payload, user: Identity = ANONYMOUS
) -> tuple[RequestId | None, Contribution, IncomingGradient]:
    """Reads the id of a gradient's call, its step, weight and sender, and its components.

    Raises:
        InvalidArgumentError: It has too many parts, or an id is not valid.
    """
    contribution = _contribution(request, user)
    given = _incoming_gradient(request, payload, user)
    return _gradient_id(request, contribution, given, user), contribution, given


def decode_staged(
    request: messages_pb2.StageGradientRequest, payload: Payload, user: Identity = ANONYMOUS
) -> tuple[PartKey, Sequence[PartKey], IncomingGradient]:
    """Reads the name of a gradient that is to be held for a round, those that its client withdraws, and its components.

    Raises:
        InvalidArgumentError: It has too many parts, or no name.
    """
    check_count(request.withdrawn, MAX_UNANSWERED, "numbers", "withdrawn")
    call = _request_id(request.request_id, b"", user)
    key, *withdrawn = [
        PartKey(request.home_incarnation, part_id(RequestId(call.client_id, sequence)))
        for sequence in (call.sequence, *request.withdrawn)
    ]
    return key, withdrawn, _incoming_gradient(request, payload, user)


def decode_take_id(request: messages_pb2.TakeGradientRequest, user: Identity = ANONYMOUS) -> RequestId | None:
    """Returns the id of a take, None if it has none."""
    if not request.HasField("request_id"):
        return None
    return _request_id(request.request_id, b"take %d" % request.num_required, user)


def decode_read_id(request: messages_pb2.ReadAverageRequest, user: Identity = ANONYMOUS) -> RequestId | None:
    """Returns the id of a read, None if it has none."""
    return _request_id(request.request_id, b"", user) if request.HasField("request_id") else None


def weight_of(request: _WithGradient) -> float:
    """Returns the weight of a gradient, which is 1 unless the request says otherwise."""
    return request.weight if request.HasField("weight") else 1.0


def epoch_of(request: _WithGradient) -> int | None:
    """Returns the epoch of a gradient for a sharded accumulator; None if the request does not say."""
    return request.epoch if request.HasField("epoch") else None


def counts_one_per_worker(request: messages_pb2.PushPullRequest) -> bool:
    """Returns True if a push_pull counts only the first gradient of its worker, which is the default."""
    return request.one_per_worker if request.HasField("one_per_worker") else True


def _incoming_gradient(request: _WithGradient, payload: Payload, user: Identity) -> IncomingGradient:
    check_count(request.gradient, MAX_COMPONENTS, "components", "gradient")
    described: list[tuple[str, tensor_pb2.Tensor]] = []
    kinds: list[tuple[str, str | None, tuple[int, ...] | None]] = []
    for index, part in enumerate(request.gradient):
        kind, dense_shape = part.WhichOneof("value"), None
        if kind == "dense":
            described.append((f"gradient[{index}].dense", part.dense))
        elif kind == "sparse":
            sparse, field = part.sparse, f"gradient[{index}].sparse"
            described += [(f"{field}.indices", sparse.indices), (f"{field}.values", sparse.values)]
            if sparse.HasField("dense_shape"):
                dims = sparse.dense_shape.dims
                check_count(dims, MAX_DIMENSIONS, "dimensions", f"{field}.dense_shape.dims")
                dense_shape = tuple(dims)
        kinds.append((part.name, kind, dense_shape))
    tensors = decode_tensors(described, payload, user)
    rest = iter(tensors)
    components = [
        IncomingComponent(
            name,
            indices=next(rest) if kind == "sparse" else None,
            value=None if kind is None else next(rest),
            dense_shape=dense_shape,
        )
        for name, kind, dense_shape in kinds
    ]
    return IncomingGradient(components, tensors, request.release_handles)


def _contribution(request: GradientRequest, user: Identity) -> Contribution:
    check_length(request.worker_id, MAX_WORKER_ID_BYTES, "worker_id")
    is_again = isinstance(request, messages_pb2.ApplyGradientRequest) and request.accepted_before
    sum_of = _summands(request, user) if request.sum_of else ()
    return Contribution(
        local_step=request.local_step,
        weight=sum_of_weights([each.weight for each in sum_of]) if sum_of else weight_of(request),
        worker_id=request.worker_id,
        sequence=request.request_id.sequence,
        sum_of=sum_of,
        epoch=epoch_of(request),
        was_accepted=is_again,
    )


def _summands(request: GradientRequest, user: Identity) -> tuple[Summand, ...]:
    check_count(request.sum_of, MAX_SUMMANDS, "gradients", "sum_of")
    if request.HasField("weight"):
        raise InvalidArgumentError("expected no weight beside those of sum_of, got one", field="weight")
    return tuple([_summand(each, f"sum_of[{index}]", user) for index, each in enumerate(request.sum_of)])


def _summand(message: accumulator_pb2.Summand, field: str, user: Identity) -> Summand:
    check_length(message.worker_id, MAX_WORKER_ID_BYTES, f"{field}.worker_id")
    return Summand(
        message.weight if message.HasField("weight") else 1.0,
        message.worker_id,
        _request_id(message.request_id, b"", user, field) if message.HasField("request_id") else None,
    )


# Ids of calls


def _gradient_id(
    request: GradientRequest, contribution: Contribution, given: IncomingGradient, user: Identity
) -> RequestId | None:
    """Returns the id of an apply or push_pull, None if it has none.

    Its fingerprint covers everything that a caller repeats when it sends a gradient again; not handles, which change
    when the gradient is uploaded again.
    """
    if not request.HasField("request_id"):
        return None
    pull = None
    if isinstance(request, messages_pb2.PushPullRequest):
        pull = (request.num_required, counts_one_per_worker(request))
    what = (type(request).__name__, pull, request.local_step, contribution.factor, request.worker_id)
    digest = blake2b(repr(what).encode(), digest_size=16)
    if contribution.sum_of:
        for each in request.sum_of:
            digest.update(each.SerializeToString(deterministic=True))
    _add_gradient(digest, given, unread=request.unread_contents)
    return _request_id(request.request_id, digest.digest(), user)


def _add_gradient(digest: blake2b, gradient: IncomingGradient, *, unread: bool) -> None:
    # What came with the request, beside the message or in it.
    num_bytes = sum([each.array.nbytes for each in gradient.tensors if each.array is not None and not each.is_on_gpu])
    by_contents = not unread and num_bytes <= _LONGEST_CONTENTS
    for component in gradient.components:
        digest.update(component.name.encode() + b"\0")
        if component.indices is not None:
            _add_tensor(digest, component.indices, by_contents=by_contents)
        if component.value is not None:
            _add_tensor(digest, component.value, by_contents=by_contents)
        if component.indices is not None:
            digest.update(repr(component.dense_shape).encode())


def _add_tensor(digest: blake2b, tensor: IncomingTensor, *, by_contents: bool) -> None:
    """Adds what very probably differs for different contents, fast even for megabytes: both ends, and all folded."""
    array = tensor.array
    if array is None:
        digest.update(repr(tensor.spec if tensor.fault is None else tensor.fault).encode())
        return
    digest.update(repr((int(to_data_type(array.dtype)), array.shape)).encode())
    if not by_contents or tensor.is_on_gpu:
        return
    content = array.reshape(-1).view(np.uint8)
    if content.size <= 2 * _SUMMARY_BYTES:
        digest.update(content.data)
        return
    words = content.size // 8
    digest.update(content[:_SUMMARY_BYTES].data)
    digest.update(content[-_SUMMARY_BYTES:].data)
    digest.update(np.bitwise_xor.reduce(content[: words * 8].view(np.uint64)).tobytes())


def _request_id(message: accumulator_pb2.RequestId, fingerprint: bytes, user: Identity, within: str = "") -> RequestId:
    field = f"{within}.request_id" if within else "request_id"
    check_length(message.client_id, MAX_ID_BYTES, f"{field}.client_id")
    check_count(message.unanswered, MAX_UNANSWERED, "numbers", f"{field}.unanswered")
    since = message.unanswered_since if message.HasField("unanswered_since") else None
    return RequestId(user.own(message.client_id), message.sequence, fingerprint, frozenset(message.unanswered), since)


# Decided rounds

_PARTS_FIELD = "average.parts"


def decode_counted(request: messages_pb2.ForgetGradientsRequest) -> frozenset[str]:
    """Returns the ids of the gradients that a home has counted.

    Raises:
        InvalidArgumentError: They are no such ids.
    """
    _check_ids(request.part_ids, "part_ids")
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
    _check_ids(parts.part_ids, f"{_PARTS_FIELD}.part_ids")
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


def _check_ids(ids: Iterable[bytes], field: str) -> None:
    for each in ids:
        if len(each) != NUM_BYTES:
            raise InvalidArgumentError(f"expected ids of {NUM_BYTES} bytes, got one of {len(each)}", field=field)
