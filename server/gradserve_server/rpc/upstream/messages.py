"""The messages between an aggregator and the servers upstream: its requests, their answers, averages and errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import gradserve.errors as client
import gradserve_server.errors as server
from gradserve.calls.exchange import Operation, Reply
from gradserve.calls.tensors import placement_of, receive_results
from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Array, Average, DifferentWorker, SparseSlices, Value
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.rpc.accumulators.requests import GradientRequest
from gradserve_server.security.identity import Identity

OUTCOMES = {
    accumulator_pb2.APPLY_OUTCOME_ACCEPTED: Outcome.ACCEPTED,
    accumulator_pb2.APPLY_OUTCOME_STALE: Outcome.STALE,
    accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED: Outcome.ALREADY_COUNTED,
}


@dataclass(frozen=True)
class Pulled:
    """The answer to a push_pull.

    Attributes:
        outcome: What became of the gradient.
        average: The average; None if there is none.
        duplicate: Whether it is the answer to an earlier call.
        global_step: The step.
    """

    outcome: Outcome
    average: Average | None
    duplicate: bool
    global_step: int


Answer: TypeAlias = messages_pb2.ApplyGradientResponse | Pulled


def answer_of(message: Any, average: Average | None) -> Answer:
    """Returns the answer in a response upstream, with its average."""
    if isinstance(message, messages_pb2.ApplyGradientResponse):
        return message
    return Pulled(OUTCOMES[message.outcome], average, message.duplicate, message.global_step)


_Waits = TypeVar("_Waits", messages_pb2.TakeGradientRequest, messages_pb2.ReadAverageRequest)

_LEFT_OUT = ("gradient", "placement", "timeout", "release_handles")
"""Fields that concern only the aggregator: the place of the tensors, and the time that it waits."""


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
    """Returns a take or a read that brings the average here; it waits for `timeout` seconds, None for no limit."""
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
        summand = sent.sum_of.add(worker_id=each.worker_id, parameters_digest=each.parameters_digest)
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


_SAME: dict[type[client.GradserveError], type[server.ServiceError]] = {
    client.InvalidArgumentError: server.InvalidArgumentError,
    client.NotFoundError: server.NotFoundError,
    client.AlreadyExistsError: server.AlreadyExistsError,
    client.AbortedError: server.AbortedError,
    client.OutOfRangeError: server.OutOfRangeError,
    client.DeadlineExceededError: server.DeadlineExceededError,
}


def served(error: client.GradserveError) -> server.ServiceError:
    """Returns an error of a call upstream for the caller here.

    What it says of the call stays as it is. What it says of the connection upstream is no matter of the caller's: it
    is not the caller's token that was refused.
    """
    if isinstance(error, client.ResourceExhaustedError):
        return server.ResourceExhaustedError(error.message, field=error.field, retry_after=error.retry_after)
    for kind, same in _SAME.items():
        if isinstance(error, kind):
            return same(error.message, field=error.field)
    message = f"the server upstream: {error.message}"
    if isinstance(error, client.UnauthenticatedError | client.PermissionDeniedError):
        return server.PermissionDeniedError(f"{message}. Its token or certificate is that of the aggregator")
    if isinstance(error, client.UnavailableError | client.CallCancelledError):
        return server.UnavailableError(message)
    return server.InternalError(message)


def receive_average(reply: Reply) -> Operation[Average | None]:
    """Returns the average in a response; None if it has none."""
    message = reply.message
    if "average" not in message.DESCRIPTOR.fields_by_name or not message.HasField("average"):
        return None
    average: accumulator_pb2.Average = message.average
    tensors: list[tensor_pb2.Tensor] = []
    for part in average.components:
        tensors += [part.sparse.indices, part.sparse.values] if part.HasField("sparse") else [part.dense]
    received = yield from receive_results(reply, tensors)
    for array in received:
        array.flags.writeable = False
    arrays = iter(received)
    values: dict[str, Value] = {}
    for part in average.components:
        if part.HasField("sparse"):
            indices = next(arrays)
            values[part.name] = SparseSlices(indices, next(arrays), tuple(part.sparse.dense_shape.dims))
        else:
            values[part.name] = next(arrays)
    return average_of(average, values)


def average_of(message: accumulator_pb2.Average, values: Mapping[str, Value]) -> Average:
    """Returns an average, of its message and its values."""
    return Average(
        values=values,
        step=message.step,
        round_number=message.round - 1,
        num_gradients=message.num_gradients,
        total_weight=message.total_weight,
        worker_ids=tuple(message.worker_ids),
        different_workers=tuple(
            [
                DifferentWorker(each.worker_id, each.equal_at if each.HasField("equal_at") else None)
                for each in message.different_workers
            ]
        ),
    )
