"""Accumulator messages and their domain values."""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2, tensor_pb2
from gradserve.wire.dtypes import to_data_type, to_dtype
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.component_names import components_named
from gradserve_server.accumulators.given import GivenComponent, GivenDense, GivenGradient, GivenSparse
from gradserve_server.accumulators.gradient import Average, Contribution, SparseSlices
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.spec import (
    AccumulatorSpec,
    ComponentSpec,
    Layout,
    PartialShape,
    Reduction,
)
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.leases.lifetime import Lifetime
from gradserve_server.resources import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.boundary.lifetimes import encode_idle_lease
from gradserve_server.rpc.tensors.messages import MAX_COMPONENTS, check_count, decode_reference

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


def decode_key(ref: accumulator_pb2.AccumulatorRef) -> ResourceKey:
    """Returns where an accumulator is found."""
    return ResourceKey(ref.container or DEFAULT_CONTAINER, ref.name)


def decode_accumulator_spec(spec: accumulator_pb2.AccumulatorSpec) -> AccumulatorSpec:
    """Reads the spec of an accumulator.

    Raises:
        InvalidArgumentError: It cannot be one.
    """
    check_count(spec.components, MAX_COMPONENTS, "components", "spec.components")
    if spec.reduction not in _REDUCTIONS:
        raise InvalidArgumentError(f"expected a known reduction, got {spec.reduction}", field="spec.reduction")
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
        )


def _decode_component(component: accumulator_pb2.ComponentSpec, field: str) -> ComponentSpec:
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
        component.name, _decode_dtype(component.dtype, f"{field}.dtype"), shape, _LAYOUTS[component.layout]
    )


def _decode_dtype(data_type: tensor_pb2.DataType, field: str) -> np.dtype[Any]:
    try:
        return to_dtype(data_type)
    except ValueError as error:
        raise InvalidArgumentError(str(error), field=field) from None


def encode_accumulator_spec(spec: AccumulatorSpec) -> accumulator_pb2.AccumulatorSpec:
    """Returns the message of a spec, every field set."""
    return accumulator_pb2.AccumulatorSpec(
        components=[
            accumulator_pb2.ComponentSpec(
                name=component.name,
                dtype=to_data_type(component.dtype),
                shape=accumulator_pb2.PartialShape(
                    unknown_rank=component.shape.dims is None, dims=component.shape.dims
                ),
                layout=_LAYOUT_CODES[component.layout],
            )
            for component in spec.components
        ],
        reduction=_REDUCTION_CODES[spec.reduction],
        accumulate_dtype=None if spec.accumulate_dtype is None else to_data_type(spec.accumulate_dtype),
        deterministic=spec.deterministic,
        keep_averages=spec.keep_averages,
        one_per_worker=spec.one_per_worker,
        refuse_non_finite=spec.refuse_non_finite,
    )


def encode_info(key: ResourceKey, accumulator: Accumulator, lifetime: Lifetime) -> accumulator_pb2.AccumulatorInfo:
    """Describes an accumulator as it is now."""
    state = accumulator.state
    return accumulator_pb2.AccumulatorInfo(
        accumulator=accumulator_pb2.AccumulatorRef(
            container=key.container, name=key.name, incarnation=accumulator.incarnation
        ),
        spec=encode_accumulator_spec(accumulator.spec),
        global_step=state.global_step,
        num_accumulated=state.num_accumulated,
        num_waiting=state.num_waiting,
        num_bytes=state.num_bytes,
        worker_ids=state.worker_ids,
        kept_steps=state.kept_steps,
        is_private=bool(lifetime.owner),
        idle_lease=encode_idle_lease(lifetime),
    )


_SUMMARY_BYTES = 4096
MAX_UNANSWERED = 1024

GradientRequest = messages_pb2.ApplyGradientRequest | messages_pb2.PushPullRequest


def decode_take_id(request: messages_pb2.TakeGradientRequest) -> RequestId | None:
    """Returns the id of a take, None when it has none."""
    if not request.HasField("request_id"):
        return None
    return _request_id(request.request_id, "take", request.num_required)


def decode_gradient(request: GradientRequest) -> tuple[RequestId | None, Contribution, GivenGradient]:
    """Reads a gradient: the id of the call, what it counts, and what it consists of.

    Raises:
        InvalidArgumentError: It has too many parts, or its id is not one.
    """
    check_count(request.gradient, MAX_COMPONENTS, "components", "gradient")
    given = GivenGradient([_given(part) for part in request.gradient], request.release_handles)
    return _gradient_id(request), _contribution(request), given


def _given(part: accumulator_pb2.ComponentGradient) -> GivenComponent:
    kind = part.WhichOneof("value")
    if kind == "dense":
        return GivenComponent(part.name, GivenDense(decode_reference(part.dense)))
    if kind is None:
        return GivenComponent(part.name, None)
    sparse = part.sparse
    dense_shape = tuple(sparse.dense_shape.dims) if sparse.HasField("dense_shape") else None
    value = GivenSparse(decode_reference(sparse.indices), decode_reference(sparse.values), dense_shape)
    return GivenComponent(part.name, value)


def _gradient_id(request: GradientRequest) -> RequestId | None:
    """Returns the id of an apply or push_pull, None when it has none.

    Its fingerprint covers all that a caller says twice when it sends a gradient again; handles it does not say
    twice when it has to upload the gradient again.
    """
    if not request.HasField("request_id"):
        return None
    pull = None
    if isinstance(request, messages_pb2.PushPullRequest):
        pull = (request.num_required, counts_one_per_worker(request))
    digest = blake2b(digest_size=16)
    for component in request.gradient:
        digest.update(component.name.encode() + b"\0")
        for tensor in _tensors_of(component):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(_summary(tensor.content))
        if component.sparse.HasField("dense_shape"):
            digest.update(repr(tuple(component.sparse.dense_shape.dims)).encode())
    return _request_id(
        request.request_id,
        type(request).__name__,
        pull,
        request.local_step,
        request.weight if request.HasField("weight") else 1.0,
        request.worker_id,
        digest.digest(),
    )


def _summary(content: bytes) -> bytes:
    """Returns something that differs, in all likelihood, for contents that differ, quickly also for megabytes."""
    words = len(content) // 8
    folded = np.bitwise_xor.reduce(np.frombuffer(content, np.uint64, words)) if words else np.uint64(0)
    return content[:_SUMMARY_BYTES] + content[-_SUMMARY_BYTES:] + folded.tobytes() + str(len(content)).encode()


def counts_one_per_worker(request: messages_pb2.PushPullRequest) -> bool:
    """Tells whether a push_pull counts only the first gradient of its worker; unset means that it does."""
    return request.one_per_worker if request.HasField("one_per_worker") else True


def _request_id(message: accumulator_pb2.RequestId, *content: object) -> RequestId:
    check_count(message.unanswered, MAX_UNANSWERED, "numbers", "request_id.unanswered")
    fingerprint = blake2b(repr(content).encode(), digest_size=16).digest()
    return RequestId(message.client_id, message.sequence, fingerprint, frozenset(message.unanswered))


def _contribution(request: GradientRequest) -> Contribution:
    return Contribution(
        local_step=request.local_step,
        weight=request.weight if request.HasField("weight") else 1.0,
        worker_id=request.worker_id,
        sequence=request.request_id.sequence,
    )


def _tensors_of(part: accumulator_pb2.ComponentGradient) -> list[tensor_pb2.Tensor]:
    if part.WhichOneof("value") == "sparse":
        return [part.sparse.indices, part.sparse.values]
    return [part.dense]


def encode_average(average: Average, delivered: Iterable[tensor_pb2.Tensor]) -> accumulator_pb2.Average:
    """Returns the message of an average, whose arrays were delivered."""
    tensors = iter(delivered)
    components = []
    for name, value in average.values.items():
        component = accumulator_pb2.ComponentGradient(name=name)
        if isinstance(value, SparseSlices):
            component.sparse.indices.CopyFrom(next(tensors))
            component.sparse.values.CopyFrom(next(tensors))
            component.sparse.dense_shape.dims.extend(value.dense_shape or ())
        else:
            component.dense.CopyFrom(next(tensors))
        components.append(component)
    return accumulator_pb2.Average(
        components=components,
        step=average.step,
        num_gradients=average.num_gradients,
        total_weight=average.total_weight,
        worker_ids=average.worker_ids,
    )
