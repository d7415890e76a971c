"""The requests that an aggregator sends for those that it gets."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gradserve.calls.tensors import placement_of
from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2, tensor_pb2
from gradserve.wire.messages import encode_duration
from gradserve_server.accumulators.gradient import Array, SparseSlices, Value
from gradserve_server.rpc.accumulators.requests import GradientRequest
from gradserve_server.security.identity import Identity

_Waits = TypeVar("_Waits", messages_pb2.TakeGradientRequest, messages_pb2.ReadAverageRequest)

_LEFT_OUT = ("gradient", "placement", "timeout", "release_handles")
"""What is the aggregator's own: where tensors are, and how long it waits."""


def without_tensors(request: GradientRequest, user: Identity) -> GradientRequest:
    """Returns what an apply or a push_pull says beside its tensors; its client belongs to a user of this server."""
    bare = type(request)()
    for field, value in request.ListFields():
        if field.name in _LEFT_OUT:
            continue
        if field.is_repeated:
            getattr(bare, field.name).MergeFrom(value)
        elif field.message_type is not None:
            getattr(bare, field.name).CopyFrom(value)
        else:
            setattr(bare, field.name, value)
    _own(bare, user)
    for each in bare.sum_of:
        _own(each, user)
    return bare


def waiting_request(request: _Waits, user: Identity, timeout: float | None) -> _Waits:
    """Returns a take or a read that waits for so many seconds, None for any time, and brings the average here."""
    sent = type(request)()
    sent.CopyFrom(request)
    if isinstance(sent, messages_pb2.TakeGradientRequest):
        _own(sent, user)
    else:
        sent.ClearField("request_id")  # averages are read once for all who ask
    sent.placement.CopyFrom(placement_of(keep=False))
    _set_timeout(sent, timeout)
    return sent


def alone(
    bare: GradientRequest,
    values: Mapping[str, Value],
    tensors: Sequence[tensor_pb2.Tensor],
    timeout: float | None,
) -> GradientRequest:
    """Returns the request for the gradient of one call, as its worker might have sent it upstream.

    Args:
        bare: The call, without its tensors.
        values: The gradient; empty if servers get their parts of it otherwise.
        tensors: The messages of its arrays.
        timeout: Seconds to wait; None for any time.
    """
    sent: Any = type(bare)()
    sent.CopyFrom(bare)
    return _with_gradient(sent, values, tensors, timeout)


def of_sum(
    summands: Sequence[GradientRequest],
    ref: accumulator_pb2.AccumulatorRef,
    request_id: accumulator_pb2.RequestId,
    values: Mapping[str, Value],
    tensors: Sequence[tensor_pb2.Tensor],
    timeout: float | None,
) -> GradientRequest:
    """Returns the request for the sum of the gradients of several calls, in the order in which they were added."""
    first = summands[0]
    sent = type(first)(local_step=first.local_step, worker_id=first.worker_id, unread_contents=True)
    sent.accumulator.CopyFrom(ref)
    sent.request_id.CopyFrom(request_id)
    if isinstance(sent, messages_pb2.PushPullRequest) and isinstance(first, messages_pb2.PushPullRequest):
        sent.num_required = first.num_required
        if first.HasField("one_per_worker"):
            sent.one_per_worker = first.one_per_worker
    for each in summands:
        if each.sum_of:
            sent.sum_of.MergeFrom(each.sum_of)
            continue
        summand = sent.sum_of.add(worker_id=each.worker_id)
        if each.HasField("weight"):
            summand.weight = each.weight
        if each.HasField("request_id"):
            summand.request_id.CopyFrom(each.request_id)
    return _with_gradient(sent, values, tensors, timeout)


def arrays_of(values: Mapping[str, Value]) -> list[Array]:
    """Returns the arrays of a gradient in the order in which requests take their messages."""
    arrays: list[Array] = []
    for value in values.values():
        arrays += [value.indices, value.values] if isinstance(value, SparseSlices) else [value]
    return arrays


def _with_gradient(
    sent: GradientRequest,
    values: Mapping[str, Value],
    tensors: Sequence[tensor_pb2.Tensor],
    timeout: float | None,
) -> GradientRequest:
    sent.release_handles = True
    if isinstance(sent, messages_pb2.PushPullRequest):
        sent.placement.CopyFrom(placement_of(keep=False))
        _set_timeout(sent, timeout)
    supply = iter(tensors)
    for name, value in values.items():
        part = sent.gradient.add(name=name)
        if not isinstance(value, SparseSlices):
            part.dense.CopyFrom(next(supply))
            continue
        part.sparse.indices.CopyFrom(next(supply))
        part.sparse.values.CopyFrom(next(supply))
        if value.dense_shape is not None:
            part.sparse.dense_shape.dims.extend(value.dense_shape)
            part.sparse.dense_shape.SetInParent()
    return sent


def _own(message: Any, user: Identity) -> None:
    if message.HasField("request_id"):
        message.request_id.client_id = user.own(message.request_id.client_id)


def _set_timeout(request: Any, timeout: float | None) -> None:
    request.ClearField("timeout")
    if timeout is not None:
        request.timeout.CopyFrom(encode_duration(timeout))
