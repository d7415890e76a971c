"""Operations on accumulators: what goes over the wire, the same for every kind."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from gradserve.calls.exchange import Operation, Unary, encode_timeout
from gradserve.calls.identity import RequestIds
from gradserve.calls.open_calls import AccumulatorKey
from gradserve.calls.tensor_calls import call_with_uploads, placement_of
from gradserve.calls.tensors import cast, data_type, receive_results, send_inputs
from gradserve.errors import DeadlineExceededError, GradserveError, InvalidArgumentError
from gradserve.results import (
    AccumulatorInfo,
    ApplyResult,
    Average,
    DenseSpec,
    IndexedSlices,
    Outcome,
    PushPullResult,
    Shape,
    SparseSpec,
    TensorHandle,
    Value,
)
from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2, tensor_pb2
from gradserve.wire.contents import Contents, WithContents
from gradserve.wire.dtypes import parse_dtype
from gradserve.wire.payload import Array

ComponentSpec = DenseSpec | SparseSpec
GradientValue = ArrayLike | TensorHandle | IndexedSlices

_SERVICE = "AccumulatorService"
_OUTCOMES = {
    accumulator_pb2.APPLY_OUTCOME_ACCEPTED: Outcome.ACCEPTED,
    accumulator_pb2.APPLY_OUTCOME_STALE: Outcome.STALE,
    accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED: Outcome.ALREADY_COUNTED,
}
_REDUCTIONS = {"MEAN": accumulator_pb2.REDUCTION_MEAN, "SUM": accumulator_pb2.REDUCTION_SUM}


@dataclass(frozen=True)
class Contribution:
    """How a gradient counts; see ApplyGradientRequest in the protos.

    Attributes:
        local_step: The step at which it was computed.
        weight: What it counts in a mean.
        worker_id: Who sends it; None for the client's default, empty for nobody in particular.
    """

    local_step: int
    weight: float
    worker_id: str | None


@dataclass(frozen=True)
class AccumulatorOptions:
    """The properties of a new accumulator; see AccumulatorSpec in the protos."""

    reduction_type: str = "MEAN"
    container: str = ""
    accumulate_dtype: DTypeLike | None = None
    deterministic: bool = False
    keep_averages: int = 1
    one_per_worker: bool = False
    refuse_non_finite: bool = False


class AccumulatorWire:
    """The exchanges on one accumulator."""

    def __init__(
        self,
        ref: accumulator_pb2.AccumulatorRef,
        components: Mapping[str, ComponentSpec],
        ids: RequestIds,
        *,
        has_default_workers: bool = True,
    ) -> None:
        """Takes what describes the accumulator, and the identity of the client.

        Args:
            ref: Its name.
            components: What it consists of.
            ids: Numbers the calls of the client.
            has_default_workers: Gradients that come without a worker_id get the client's. Not where the order of
                workers matters, which would be another one in every run.
        """
        self.ref = ref
        self.components = dict(components)
        self._ids = ids
        self._has_default_workers = has_default_workers

    def apply(
        self, gradient: Mapping[str, GradientValue], how: Contribution, request_id: int | None
    ) -> Operation[ApplyResult]:
        """Applies a gradient, given by component."""
        number = self._ids.next() if request_id is None else request_id
        contents = Contents()
        tensors, parts = yield from self._send(gradient, contents)
        request = messages_pb2.ApplyGradientRequest(**self._gradient_fields(gradient, number, how, parts))
        call = Unary(_SERVICE, "ApplyGradient", WithContents(request, contents))
        with _identified(number):
            reply: messages_pb2.ApplyGradientResponse = yield from call_with_uploads(
                call, tensors, released=request.release_handles
            )
        return ApplyResult(_OUTCOMES[reply.outcome], reply.duplicate, reply.global_step, reply.num_accumulated)

    def take(self, num_required: int, timeout: float, request_id: int | None) -> Operation[Average]:
        """Waits for enough gradients and takes their average."""
        number = self._ids.next() if request_id is None else request_id
        request = messages_pb2.TakeGradientRequest(
            accumulator=self.ref,
            request_id=self._ids.message(number, self.ref),
            num_required=_int32(num_required, "num_required"),
            placement=placement_of(keep=False),
            timeout=encode_timeout(timeout),
        )
        with _identified(number, waits=True), self._ids.open_calls.opened(self._key, number):
            reply: messages_pb2.TakeGradientResponse = yield Unary(_SERVICE, "TakeGradient", request, wait=timeout)
            return (yield from _receive_average(reply.average))

    def push_pull(
        self,
        gradient: Mapping[str, GradientValue],
        num_required: int,
        how: Contribution,
        timeout: float,
        request_id: int | None,
        *,
        one_per_worker: bool,
    ) -> Operation[PushPullResult]:
        """Applies a gradient and waits for the average of its round."""
        number = self._ids.next() if request_id is None else request_id
        contents = Contents()
        with contextlib.ExitStack() as under_way:
            if one_per_worker and how.worker_id is None and self._has_default_workers:
                under_way.enter_context(self._ids.open_calls.alone(self._key, self._ids.worker_id()))
            tensors, parts = yield from self._send(gradient, contents)
            request = messages_pb2.PushPullRequest(
                **self._gradient_fields(gradient, number, how, parts),
                num_required=_int32(num_required, "num_required"),
                placement=placement_of(keep=False),
                timeout=encode_timeout(timeout),
                one_per_worker=one_per_worker,
            )
            under_way.enter_context(_identified(number, waits=True))
            under_way.enter_context(self._ids.open_calls.opened(self._key, number))
            call = Unary(_SERVICE, "PushPull", WithContents(request, contents), wait=timeout)
            reply: messages_pb2.PushPullResponse = yield from call_with_uploads(
                call, tensors, released=request.release_handles
            )
            average = Average({}, reply.global_step, 0, 0.0, ())
            if reply.HasField("average"):
                average = yield from _receive_average(reply.average)
        return PushPullResult(
            **vars(average),
            outcome=_OUTCOMES[reply.outcome],
            duplicate=reply.duplicate,
            global_step=reply.global_step,
        )

    def read_average(self, step: int | None, timeout: float) -> Operation[Average]:
        """Waits for the average of a step."""
        request = messages_pb2.ReadAverageRequest(
            accumulator=self.ref, step=step, placement=placement_of(keep=False), timeout=encode_timeout(timeout)
        )
        reply: messages_pb2.ReadAverageResponse = yield Unary(_SERVICE, "ReadAverage", request, wait=timeout)
        return (yield from _receive_average(reply.average))

    def num_accumulated(self) -> Operation[int]:
        """Returns the number of gradients in the round."""
        request = messages_pb2.GetNumAccumulatedRequest(accumulator=self.ref)
        reply: messages_pb2.GetNumAccumulatedResponse = yield Unary(_SERVICE, "GetNumAccumulated", request)
        return reply.num_accumulated

    def set_global_step(self, global_step: int) -> Operation[None]:
        """Sets the step."""
        request = messages_pb2.SetGlobalStepRequest(accumulator=self.ref, global_step=global_step)
        yield Unary(_SERVICE, "SetGlobalStep", request)

    def info(self) -> Operation[AccumulatorInfo]:
        """Describes the accumulator."""
        request = messages_pb2.GetAccumulatorRequest(accumulator=self.ref)
        reply: messages_pb2.GetAccumulatorResponse = yield Unary(_SERVICE, "GetAccumulator", request)
        return _info(reply.info)

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator."""
        request = messages_pb2.DeleteAccumulatorRequest(accumulator=self.ref)
        reply: messages_pb2.DeleteAccumulatorResponse = yield Unary(_SERVICE, "DeleteAccumulator", request)
        return reply.deleted

    @property
    def _key(self) -> AccumulatorKey:
        return self.ref.container, self.ref.name

    def _worker_id(self, how: Contribution) -> str:
        if how.worker_id is not None:
            return how.worker_id
        return self._ids.worker_id() if self._has_default_workers else ""

    def _gradient_fields(
        self,
        gradient: Mapping[str, GradientValue],
        number: int,
        how: Contribution,
        parts: list[accumulator_pb2.ComponentGradient],
    ) -> dict[str, Any]:
        """Returns what applying and push_pull have in common."""
        return {
            "accumulator": self.ref,
            "request_id": self._ids.message(number, self.ref),
            "local_step": how.local_step,
            "gradient": parts,
            "weight": how.weight,
            "worker_id": self._worker_id(how),
            # What the caller keeps on the server stays there; what was uploaded for this call need not.
            "release_handles": not any(isinstance(value, TensorHandle) for value in gradient.values()),
        }

    def _send(
        self, gradient: Mapping[str, GradientValue], contents: Contents
    ) -> Operation[tuple[list[tensor_pb2.Tensor], list[accumulator_pb2.ComponentGradient]]]:
        values = [(name, self._value(name, value)) for name, value in gradient.items()]
        arrays: list[Array] = []
        for _name, value in values:
            if isinstance(value, IndexedSlices):
                arrays += [value.indices, value.values]
            elif not isinstance(value, TensorHandle):
                arrays.append(value)
        tensors = yield from send_inputs(tuple(arrays), contents)
        supply = iter(tensors)
        parts = []
        for name, value in values:
            if isinstance(value, IndexedSlices):
                sparse = accumulator_pb2.SparseGradient(indices=next(supply), values=next(supply))
                if value.dense_shape is not None:
                    sparse.dense_shape.dims.extend(value.dense_shape)
                    sparse.dense_shape.SetInParent()
                parts.append(accumulator_pb2.ComponentGradient(name=name, sparse=sparse))
            elif isinstance(value, TensorHandle):
                parts.append(accumulator_pb2.ComponentGradient(name=name, dense={"handle": value.handle}))
            else:
                parts.append(accumulator_pb2.ComponentGradient(name=name, dense=next(supply)))
        return tensors, parts

    def _value(self, name: str, value: GradientValue) -> Value | TensorHandle:
        spec = self.components.get(name)
        if spec is None:
            raise InvalidArgumentError(f"expected components {sorted(self.components)}, got {name!r}", field="gradient")
        dtype = parse_dtype(spec.dtype)
        if isinstance(spec, SparseSpec) != isinstance(value, IndexedSlices):
            expected = "IndexedSlices" if isinstance(spec, SparseSpec) else "an array"
            raise InvalidArgumentError(
                f"expected {expected} for component {name!r}, got {type(value).__name__}", field="gradient"
            )
        if isinstance(value, IndexedSlices):
            return IndexedSlices(
                cast(value.values, dtype, f"component {name!r}", "gradient"), _indices(value.indices), value.dense_shape
            )
        if isinstance(value, TensorHandle):
            return value
        return cast(value, dtype, f"component {name!r}", "gradient")


def create(
    name: str, components: Mapping[str, ComponentSpec], options: AccumulatorOptions, ids: RequestIds
) -> Operation[AccumulatorWire]:
    """Creates an accumulator, or finds the one of this name and spec."""
    if options.reduction_type not in _REDUCTIONS:
        raise InvalidArgumentError(
            f"expected reduction_type 'MEAN' or 'SUM', got {options.reduction_type!r}", field="reduction_type"
        )
    spec = accumulator_pb2.AccumulatorSpec(
        components=[_component_message(name, component) for name, component in components.items()],
        reduction=_REDUCTIONS[options.reduction_type],
        deterministic=options.deterministic,
        keep_averages=_int32(options.keep_averages, "keep_averages"),
        one_per_worker=options.one_per_worker,
        refuse_non_finite=options.refuse_non_finite,
    )
    if options.accumulate_dtype is not None:
        spec.accumulate_dtype = data_type(options.accumulate_dtype, "accumulate_dtype")
    if options.keep_averages < 1:
        raise InvalidArgumentError(
            f"expected keep_averages of at least 1, got {options.keep_averages}", field="keep_averages"
        )
    request = messages_pb2.CreateAccumulatorRequest(
        accumulator=accumulator_pb2.AccumulatorRef(container=options.container, name=name), spec=spec
    )
    reply: messages_pb2.CreateAccumulatorResponse = yield Unary(_SERVICE, "CreateAccumulator", request)
    return AccumulatorWire(reply.info.accumulator, components, ids, has_default_workers=not options.deterministic)


def list_accumulators(container: str) -> Operation[list[AccumulatorInfo]]:
    """Lists the accumulators of a container."""
    found: list[AccumulatorInfo] = []
    request = messages_pb2.ListAccumulatorsRequest(container=container)
    while True:
        reply: messages_pb2.ListAccumulatorsResponse = yield Unary(_SERVICE, "ListAccumulators", request)
        found += [_info(info) for info in reply.accumulators]
        if not reply.next_page_token:
            return found
        request = messages_pb2.ListAccumulatorsRequest(container=container, page_token=reply.next_page_token)


@contextmanager
def _identified(number: int, *, waits: bool = False) -> Iterator[None]:
    """Puts the request id on errors, for whoever wants to send the call again, or to wait on."""
    try:
        yield
    except GradserveError as error:
        error.request_id = number
        if waits and isinstance(error, DeadlineExceededError):
            error.message += f"; to wait on, make the same call again with request_id={number}"
        raise


def _receive_average(message: accumulator_pb2.Average) -> Operation[Average]:
    tensors: list[tensor_pb2.Tensor] = []
    for part in message.components:
        sparse = part.WhichOneof("value") == "sparse"
        tensors += [part.sparse.indices, part.sparse.values] if sparse else [part.dense]
    arrays = iter((yield from receive_results(tensors)))
    components: dict[str, Value] = {}
    for part in message.components:
        if part.WhichOneof("value") == "sparse":
            indices = next(arrays)
            components[part.name] = IndexedSlices(next(arrays), indices, tuple(part.sparse.dense_shape.dims))
        else:
            components[part.name] = next(arrays)
    return Average(components, message.step, message.num_gradients, message.total_weight, tuple(message.worker_ids))


def _info(info: accumulator_pb2.AccumulatorInfo) -> AccumulatorInfo:
    return AccumulatorInfo(
        container=info.accumulator.container,
        name=info.accumulator.name,
        global_step=info.global_step,
        num_accumulated=info.num_accumulated,
        num_waiting=info.num_waiting,
        num_bytes=info.num_bytes,
        worker_ids=tuple(info.worker_ids),
        kept_steps=tuple(info.kept_steps),
    )


def _component_message(name: str, spec: ComponentSpec) -> accumulator_pb2.ComponentSpec:
    return accumulator_pb2.ComponentSpec(
        name=name,
        dtype=data_type(spec.dtype, f"component {name!r}"),
        shape=_shape_message(spec.shape),
        layout=(accumulator_pb2.LAYOUT_SPARSE if isinstance(spec, SparseSpec) else accumulator_pb2.LAYOUT_DENSE),
    )


def _shape_message(shape: Shape | None) -> accumulator_pb2.PartialShape:
    if shape is None:
        return accumulator_pb2.PartialShape(unknown_rank=True)
    return accumulator_pb2.PartialShape(dims=[-1 if size is None else size for size in shape])


def _int32(value: int, field: str) -> int:
    if not -(2**31) <= value < 2**31:
        raise InvalidArgumentError(f"expected a 32-bit {field}, got {value}", field=field)
    return value


def _indices(value: ArrayLike) -> Array:
    array = np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"expected integer indices, got {array.dtype}", field="gradient.indices")
    return np.asarray(array, dtype=np.int64, order="C")
