"""The messages between an aggregator and the servers upstream: its requests, their answers, averages and errors."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

import gradserve.errors as client
import gradserve_server.errors as server
from gradserve.calls.exchange import Operation, Reply
from gradserve.calls.tensors import placement_of, receive_results
from gradserve_protocol.messages import encode_codec, encode_duration
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import (
    accumulator_pb2,
    accumulator_service_pb2,
    parameters_messages_pb2,
    parameters_pb2,
    parameters_service_pb2,
    tensor_pb2,
)
from gradserve_server.accumulators.gradient import Array, Average, DifferentWorker, Packed, SparseSlices, Value
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.parameters.versions import Version
from gradserve_server.rpc.accumulators.requests import GradientRequest, counts_one_per_worker
from gradserve_server.rpc.parameters.updates import UpdateRequest
from gradserve_server.security.identity import Identity

MessageT = TypeVar("MessageT", bound=Message)
Ref: TypeAlias = accumulator_pb2.AccumulatorRef | parameters_pb2.ParametersRef
"""The name of something upstream."""
Contributed: TypeAlias = GradientRequest | UpdateRequest
"""A request with the gradient of an accumulator, or an update of parameters."""

_SERVICES = {
    method.name: service.name
    for service in (
        accumulator_service_pb2.DESCRIPTOR.services_by_name["AccumulatorService"],
        parameters_service_pb2.DESCRIPTOR.services_by_name["ParameterService"],
    )
    for method in service.methods
}
_PULLS = (messages_pb2.PushPullRequest, parameters_messages_pb2.PushPullParametersRequest)


def copied(message: MessageT) -> MessageT:
    """Returns a copy of a request, to which the server upstream may be written."""
    sent = type(message)()
    sent.CopyFrom(message)
    return sent


def service_of(method: str) -> str:
    """Returns the service that has a method, without its package; no two have methods of the same name."""
    return _SERVICES[method]


def ref_of(message: Any) -> Ref:
    """Returns the name in a request or a description, to which may be written."""
    named: Ref = message.parameters if "parameters" in message.DESCRIPTOR.fields_by_name else message.accumulator
    return named


def method_of(request: Message) -> str:
    """Returns the method of a request."""
    return request.DESCRIPTOR.name.removesuffix("Request")


def waits_for_round(request: Contributed) -> bool:
    """Returns True if a call waits for the end of the round."""
    return isinstance(request, _PULLS)


def batch_key(request: Contributed) -> Hashable:
    """Returns what the requests have in common whose gradients may be added up."""
    pull = None
    if isinstance(request, messages_pb2.PushPullRequest):
        pull = (request.num_required, counts_one_per_worker(request))
    return method_of(request), pull, request.local_step, ref_of(request).server_incarnation


OUTCOMES = {
    accumulator_pb2.APPLY_OUTCOME_ACCEPTED: Outcome.ACCEPTED,
    accumulator_pb2.APPLY_OUTCOME_STALE: Outcome.STALE,
    accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED: Outcome.ALREADY_COUNTED,
}


@dataclass(frozen=True)
class Pulled:
    """The answer to a push_pull.

    Attributes:
        outcome: What became of the gradient or update.
        average: The average or version; None if there is none.
        duplicate: Whether it is the answer to an earlier call.
        global_step: The step.
        staleness: Of an update, the number of versions made since the one from which it was computed.
        weight: Of an update, the weight that counts.
    """

    outcome: Outcome
    average: Average | None
    duplicate: bool
    global_step: int
    staleness: int = 0
    weight: float = 0.0


Answer: TypeAlias = messages_pb2.ApplyGradientResponse | parameters_messages_pb2.PushResponse | Pulled


def answer_of(message: Any, average: Average | None) -> Answer:
    """Returns the answer in a response upstream, with its average or version."""
    if isinstance(message, parameters_messages_pb2.PushPullParametersResponse):
        return Pulled(
            OUTCOMES[message.outcome],
            average,
            message.duplicate,
            message.version.step,
            message.staleness,
            message.weight,
        )
    if isinstance(message, messages_pb2.PushPullResponse):
        return Pulled(OUTCOMES[message.outcome], average, message.duplicate, message.global_step)
    answer: Answer = message
    return answer


_Waits = TypeVar(
    "_Waits",
    messages_pb2.TakeGradientRequest,
    messages_pb2.ReadAverageRequest,
    parameters_messages_pb2.ReadParametersRequest,
)

_LEFT_OUT = ("gradient", "update", "placement", "timeout", "release_handles", "without_values", "codec")
"""Fields that concern only the aggregator: the place and the form of tensors, and the time that it waits."""


def without_tensors(request: Contributed, user: Identity) -> Contributed:
    """Returns what a call says beside its gradient or update; its client belongs to a user of this server."""
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
    own_id(bare, user)
    for each in bare.sum_of:
        own_id(each, user)
    return bare


def waiting_request(request: _Waits, user: Identity, timeout: float | None) -> _Waits:
    """Returns a take or a read that brings the result here; it waits for `timeout` seconds, None for no limit."""
    sent = type(request)()
    sent.CopyFrom(request)
    if isinstance(sent, messages_pb2.TakeGradientRequest):
        own_id(sent, user)
    elif isinstance(sent, messages_pb2.ReadAverageRequest):
        sent.ClearField("request_id")  # averages are read once for all who ask
    sent.placement.CopyFrom(placement_of(keep=False))
    _set_timeout(sent, timeout)
    return sent


def alone(
    bare: Contributed,
    values: Mapping[str, Value | Packed],
    tensors: Sequence[tensor_pb2.Tensor],
    timeout: float | None,
    *,
    without_values: bool = False,
) -> Contributed:
    """Returns the request for the gradient of one call, as its worker might have sent it upstream.

    Args:
        bare: The call, without its tensors.
        values: The gradient; empty if servers get their parts of it otherwise.
        tensors: The messages of its arrays.
        timeout: Seconds to wait; None for any time.
        without_values: Whether to leave the components out of the version in the answer.
    """
    sent: Any = type(bare)()
    sent.CopyFrom(bare)
    if without_values:
        sent.without_values = True
    return _with_gradient(sent, values, tensors, timeout)


def of_sum(
    summands: Sequence[Contributed],
    request_id: accumulator_pb2.RequestId,
    values: Mapping[str, Value | Packed],
    tensors: Sequence[tensor_pb2.Tensor],
    timeout: float | None,
) -> Contributed:
    """Returns the request for the sum of the gradients of several calls, in the order in which they were added."""
    first = summands[0]
    sent: Any = type(first)(local_step=first.local_step, worker_id=first.worker_id, unread_contents=True)
    ref_of(sent).CopyFrom(ref_of(first))  # type: ignore[arg-type]
    sent.request_id.CopyFrom(request_id)
    if isinstance(first, messages_pb2.PushPullRequest):
        sent.num_required = first.num_required
        if first.HasField("one_per_worker"):
            sent.one_per_worker = first.one_per_worker
    for each in summands:
        if each.sum_of:
            sent.sum_of.MergeFrom(each.sum_of)
            continue
        summand = sent.sum_of.add(worker_id=each.worker_id, parameters_digest=getattr(each, "parameters_digest", b""))
        if each.HasField("weight"):
            summand.weight = each.weight
        if isinstance(each, UpdateRequest):
            summand.metrics.update(each.metrics)
        if each.HasField("request_id"):
            summand.request_id.CopyFrom(each.request_id)
    return _with_gradient(sent, values, tensors, timeout)


def arrays_of(values: Mapping[str, Value | Packed]) -> list[Array]:
    """Returns the arrays of a gradient in the order in which requests take their messages."""
    arrays: list[Array] = []
    for value in values.values():
        if isinstance(value, SparseSlices):
            arrays += [value.indices, value.values]
        else:
            arrays.append(value.data if isinstance(value, Packed) else value)
    return arrays


def _with_gradient(
    sent: Contributed,
    values: Mapping[str, Value | Packed],
    tensors: Sequence[tensor_pb2.Tensor],
    timeout: float | None,
) -> Contributed:
    sent.release_handles = True
    if isinstance(sent, _PULLS):
        sent.placement.CopyFrom(placement_of(keep=False))
        _set_timeout(sent, timeout)
    supply = iter(tensors)
    parts = sent.update if isinstance(sent, UpdateRequest) else sent.gradient
    for name, value in values.items():
        part = parts.add(name=name)
        if isinstance(value, Packed):
            part.packed.codec = encode_codec(value.codec)
            part.packed.data.CopyFrom(next(supply))
            continue
        if not isinstance(value, SparseSlices):
            part.dense.CopyFrom(next(supply))
            continue
        part.sparse.indices.CopyFrom(next(supply))
        part.sparse.values.CopyFrom(next(supply))
        if value.dense_shape is not None:
            part.sparse.dense_shape.dims.extend(value.dense_shape)
            part.sparse.dense_shape.SetInParent()
    return sent


def own_id(message: Any, user: Identity) -> None:
    """Makes the client in the id of a call one of a user of this server."""
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
    client.LostError: server.AbortedError,
}


def served(error: client.GradserveError) -> server.ServiceError:
    """Returns an error of a call upstream for the caller here.

    What it says of the call stays as it is. What it says of the connection upstream is no matter of the caller's: it
    is not the caller's token that was refused.
    """
    if isinstance(error, client.ResourceExhaustedError):
        return server.ResourceExhaustedError(
            error.message, field=error.field, retry_after=error.retry_after, code=error.code
        )
    for kind, same in _SAME.items():
        if isinstance(error, kind):
            return same(error.message, field=error.field, code=error.code)
    message = f"the server upstream: {error.message}"
    if isinstance(error, client.UnauthenticatedError | client.PermissionDeniedError):
        return server.PermissionDeniedError(
            f"{message}. Its token or certificate is that of the aggregator", code="GS_UPSTREAM_CREDENTIALS"
        )
    if isinstance(error, client.UnavailableError | client.CallCancelledError):
        return server.UnavailableError(message)
    return server.InternalError(message)


def receive_result(reply: Reply) -> Operation[Average | None]:
    """Returns the average or version in a response; None if it has none."""
    for name in ("average", "version"):
        if name in reply.message.DESCRIPTOR.fields_by_name and reply.message.HasField(name):
            return (yield from _receive(reply, getattr(reply.message, name)))
    return None


def _receive(reply: Reply, average: accumulator_pb2.Average | parameters_pb2.Version) -> Operation[Average]:
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
    if isinstance(average, parameters_pb2.Version):
        return version_of(average, values)
    return average_of(average, values)


def version_of(message: parameters_pb2.Version, values: Mapping[str, Value]) -> Version:
    """Returns a version, of its message and its values. Its step takes the place of the number of a round."""
    return Version(
        values=values,
        step=message.step,
        round_number=message.step,
        num_gradients=message.num_updates,
        total_weight=message.total_weight,
        worker_ids=tuple(message.worker_ids),
        digest=message.digest,
    )


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
