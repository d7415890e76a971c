"""Operations on accumulators of every kind: the messages they send and receive."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import (
    Components,
    Sent,
    add_gradient,
    arrays_of,
    receive_values,
    without_arrays,
)
from gradserve.calls.accumulators.creation import delete, described
from gradserve.calls.accumulators.session import AccumulatorSession, RequestOfAccumulator
from gradserve.calls.exchange import Operation, Progress, Reply, Unary, Whole, encode_timeout
from gradserve.calls.identity import AccumulatorKey, CallId, RequestIds
from gradserve.calls.tensors import call_with_arrays, placement_of
from gradserve.conversion.plain import as_flag, as_integer, plain_fields
from gradserve.conversion.trees import Tree
from gradserve.results import (
    AccumulatorInfo,
    ApplyResult,
    Average,
    Outcome,
    PushPullResult,
    Value,
)
from gradserve.workers import TO_WAIT_ON
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import AnyArray
from gradserve_protocol.errors import DeadlineExceededError, GradserveError
from gradserve_protocol.gpu import GpuArray
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2

_NumberedRequest: TypeAlias = (
    messages_pb2.ApplyGradientRequest
    | messages_pb2.PushPullRequest
    | messages_pb2.TakeGradientRequest
    | messages_pb2.ReadAverageRequest
)
"""A request of a call that has a number."""
Awaiting: TypeAlias = messages_pb2.PushPullRequest | messages_pb2.TakeGradientRequest | messages_pb2.ReadAverageRequest
"""A request of a call that waits for an average."""

_SERVICE = "AccumulatorService"
_OUTCOMES = {
    accumulator_pb2.APPLY_OUTCOME_ACCEPTED: Outcome.ACCEPTED,
    accumulator_pb2.APPLY_OUTCOME_STALE: Outcome.STALE,
    accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED: Outcome.ALREADY_COUNTED,
}
_AUTO = placement_of(keep=False)
_COPY = Argument("copy")


class Contribution(NamedTuple):
    """The step, weight and sender of a gradient; see ApplyGradientRequest in the protos.

    Attributes:
        local_step: The step at which it was computed.
        weight: Its weight in a mean.
        worker_id: The sender's id; None for the client's default, empty for no id.
    """

    local_step: int
    weight: float
    worker_id: str | None


class Given(NamedTuple):
    """A gradient as a call gives it.

    Attributes:
        call: The request id of the call.
        local_step: The step at which it was computed.
        values: What is sent for each component.
        weight: Its weight.
        is_kept: Whether the call keeps it until it has the average.
    """

    call: CallId
    local_step: int
    values: Mapping[str, Sent]
    weight: float
    is_kept: bool


class AccumulatorWire:
    """The operations on one accumulator.

    Attributes:
        target: The index of its server.
        components: Its components.
    """

    def __init__(
        self,
        session: AccumulatorSession,
        components: Components,
        ids: RequestIds,
        *,
        has_default_workers: bool = True,
        deleted: Callable[[str, str], object],
        target: int = 0,
    ) -> None:
        """Takes the accumulator and its components, and the client's identity.

        Args:
            session: The accumulator.
            components: Its components.
            ids: The client's request ids.
            has_default_workers: Whether gradients without a worker_id get the client's. They must not if sums are in
                the order of workers, because default ids differ from run to run.
            deleted: Called with container and name after the accumulator was deleted.
            target: The index of its server.
        """
        self.target = target
        self._session = session
        self._key: AccumulatorKey = (session.ref.container, session.ref.name)
        self.components = components
        self._ids = ids
        self._has_default_workers = has_default_workers
        self._deleted = deleted

    @property
    def ref(self) -> accumulator_pb2.AccumulatorRef:
        """The accumulator's name."""
        return self._session.ref

    def apply(
        self, gradient: Tree, how: Contribution, request_id: int | None, progress: Progress | None = None
    ) -> Operation[ApplyResult]:
        """Applies a gradient: a tree of the components, or a dict by component name."""
        call = self._call(request_id)
        values = self.components.gradient(gradient)
        carried = self._carried(values)
        arrays, has_handles = arrays_of(carried)
        fields = self._gradient_fields(messages_pb2.ApplyGradientRequest, how, carried, has_handles=has_handles)

        sent = messages_pb2.ApplyGradientRequest()

        def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
            nonlocal sent
            sent = self._apply_request(fields, call, carried, tensors)
            return sent

        try:
            reply = yield from self._call_with_gradient(
                "ApplyGradient",
                Given(call, fields["local_step"], values, fields["weight"], is_kept=False),
                arrays,
                request,
                released=not has_handles,
                progress=progress,
            )
        except GradserveError as error:
            self._identify(error, call)
            raise
        answer: messages_pb2.ApplyGradientResponse = reply.message
        if self._session.notes_gradients and answer.round:
            again = partial(self._apply_request, fields, call, without_arrays(carried))
            yield from self._session.accepted(sent, answer, again, None if has_handles else arrays)
        return ApplyResult(_OUTCOMES[answer.outcome], answer.duplicate, answer.global_step, answer.num_accumulated)

    def take(
        self,
        num_required: int,
        timeout: float,
        request_id: int | None,
        progress: Progress | None = None,
        *,
        copy: bool = True,
    ) -> Operation[Average]:
        """Waits for enough gradients and takes their average."""
        in_place = _in_place(copy)
        request = messages_pb2.TakeGradientRequest(
            **plain_fields(messages_pb2.TakeGradientRequest, {"num_required": num_required}),
            timeout=encode_timeout(timeout),
        )
        with self._ids.open_calls.opened(self._key, partial(self._call, request_id)) as call:
            self._address(request, call)
            request.placement.CopyFrom(_AUTO)
            try:
                sent = self._unary("TakeGradient", request, timeout, in_place=in_place)
                reply = yield from self._waited(Whole(sent, progress=progress))
                return (yield from self._receive_average(request, reply, progress, in_place=in_place))
            except GradserveError as error:
                self._identify(error, call, waits=True)
                raise

    def push_pull(
        self,
        gradient: Tree,
        num_required: int,
        how: Contribution,
        timeout: float,
        request_id: int | None,
        progress: Progress | None = None,
        *,
        one_per_worker: bool,
        copy: bool = True,
    ) -> Operation[PushPullResult]:
        """Applies a gradient and waits for the average of its round."""
        in_place = _in_place(copy)
        self._session.check()
        values = self.components.gradient(gradient)
        carried = self._carried(values)
        arrays, has_handles = arrays_of(carried)
        fields = self._gradient_fields(messages_pb2.PushPullRequest, how, carried, has_handles=has_handles)
        fields |= plain_fields(
            messages_pb2.PushPullRequest, {"num_required": num_required, "one_per_worker": one_per_worker}
        )
        is_alone = one_per_worker and how.worker_id is None and self._has_default_workers
        with (
            self._ids.open_calls.alone(self._key, self._ids.worker_id()) if is_alone else contextlib.nullcontext(),
            self._ids.open_calls.opened(self._key, partial(self._call, request_id)) as call,
        ):
            given = Given(call, fields["local_step"], values, fields["weight"], is_kept=True)
            message = messages_pb2.PushPullRequest()

            def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
                nonlocal message
                message = messages_pb2.PushPullRequest(**fields, timeout=encode_timeout(timeout))
                self._address(message, call)
                message.placement.CopyFrom(_AUTO)
                add_gradient(message, carried, tensors)
                return message

            try:
                reply = yield from self._call_with_gradient(
                    "PushPull",
                    given,
                    arrays,
                    request,
                    wait=timeout,
                    released=not has_handles,
                    in_place=in_place,
                    progress=progress,
                )
                answer: messages_pb2.PushPullResponse = reply.message
                average = Average({}, None, answer.global_step, 0, 0.0, ())
                if answer.HasField("average"):
                    average = yield from self._receive_average(message, reply, progress, in_place=in_place, given=given)
            except GradserveError as error:
                self._identify(error, call, waits=True)
                raise
        return PushPullResult(
            **vars(average),
            outcome=_OUTCOMES[answer.outcome],
            duplicate=answer.duplicate,
            global_step=answer.global_step,
        )

    def read_average(
        self, step: int | None, timeout: float, progress: Progress | None = None, *, copy: bool = True
    ) -> Operation[Average]:
        """Waits for the average of a step."""
        in_place = _in_place(copy)
        fields = {} if step is None else plain_fields(messages_pb2.ReadAverageRequest, {"step": step})
        request = messages_pb2.ReadAverageRequest(
            accumulator=self._checked_ref(), **fields, placement=_AUTO, timeout=encode_timeout(timeout)
        )
        return (yield from self._read(request, timeout, progress, in_place=in_place))

    def _read(
        self, request: messages_pb2.ReadAverageRequest, timeout: float, progress: Progress | None, *, in_place: bool
    ) -> Operation[Average]:
        call = self._unary("ReadAverage", request, timeout, in_place=in_place)
        reply = yield from self._waited(Whole(call, progress=progress))
        return (yield from self._receive_average(request, reply, progress, in_place=in_place))

    def num_accumulated(self) -> Operation[int]:
        """Returns the number of gradients in the round."""
        request = messages_pb2.GetNumAccumulatedRequest(accumulator=self._checked_ref())
        reply: messages_pb2.GetNumAccumulatedResponse = yield self._unary("GetNumAccumulated", request)
        self._session.learned(request, reply.num_rounds)
        self._session.epoch = reply.epoch
        return reply.num_accumulated

    def set_global_step(self, global_step: int) -> Operation[None]:
        """Sets the accumulator's step."""
        step = as_integer(global_step, Argument("new_global_step"))
        request = messages_pb2.SetGlobalStepRequest(accumulator=self._checked_ref(), global_step=step)
        yield self._unary("SetGlobalStep", request)
        self._session.step_set(step)

    def info(self) -> Operation[AccumulatorInfo]:
        """Describes the accumulator."""
        request = messages_pb2.GetAccumulatorRequest(accumulator=self._checked_ref())
        reply: messages_pb2.GetAccumulatorResponse = yield self._unary("GetAccumulator", request)
        return described(reply.info)

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator."""
        ref = accumulator_pb2.AccumulatorRef()
        ref.CopyFrom(self.ref)
        ref.server_incarnation = ""
        deleted = (yield from delete(ref)).deleted
        self._deleted(ref.container, ref.name)
        return deleted

    def _worker_id(self, how: Contribution) -> str:
        if how.worker_id is not None:
            return how.worker_id
        return self._ids.worker_id() if self._has_default_workers else ""

    def _unary(self, method: str, request: RequestOfAccumulator, wait: float = 0.0, *, in_place: bool = False) -> Unary:
        renewal = partial(self._session.renew, request)
        return Unary(_SERVICE, method, request, wait, in_place=in_place, renewal=renewal)

    def _waited(self, call: Whole) -> Operation[Reply]:
        """Makes a call that may wait."""
        reply: Reply = yield call
        return reply

    def _checked_ref(self) -> accumulator_pb2.AccumulatorRef:
        self._session.check()
        return self._session.ref

    def _apply_request(
        self,
        fields: Mapping[str, Any],
        call: CallId,
        values: Mapping[str, Sent],
        tensors: Sequence[tensor_pb2.Tensor],
    ) -> messages_pb2.ApplyGradientRequest:
        message = messages_pb2.ApplyGradientRequest(**fields)
        self._address(message, call)
        add_gradient(message, values, tensors)
        return message

    def _receive_average(
        self,
        request: Awaiting,
        reply: Reply,
        progress: Progress | None,
        *,
        in_place: bool,
        given: Given | None = None,
    ) -> Operation[Average]:
        """Returns the average in a reply.

        Args:
            request: The request.
            reply: The reply.
            progress: Told how many bytes were moved.
            in_place: Whether arrays may be read-only memory of the server.
            given: The gradient of the call, if it has one.
        """
        message: accumulator_pb2.Average = reply.message.average
        self._session.learned(request, message.round, message.step)
        values = yield from self._receive_values(request, reply, progress, in_place=in_place, given=given)
        components, gradients = self.components.average(values)
        return Average(
            components=components,
            gradients=gradients,
            step=message.step,
            num_gradients=message.num_gradients,
            total_weight=message.total_weight,
            worker_ids=tuple(message.worker_ids),
        )

    def _carried(self, values: Mapping[str, Sent]) -> Mapping[str, Sent]:
        """Returns what of a gradient is in the call that applies it."""
        return values

    def _call_with_gradient(
        self,
        method: str,
        _given: Given,
        arrays: Sequence[AnyArray],
        request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
        *,
        wait: float = 0.0,
        released: bool,
        in_place: bool = False,
        progress: Progress | None,
    ) -> Operation[Reply]:
        """Makes the call that applies a gradient; see `call_with_arrays`."""
        return call_with_arrays(
            _SERVICE,
            method,
            arrays,
            request,
            wait=wait,
            released=released,
            in_place=in_place,
            renew=self._session.renew,
            progress=progress,
        )

    def _receive_values(
        self,
        _request: Awaiting,
        reply: Reply,
        progress: Progress | None,
        *,
        in_place: bool,
        given: Given | None,
    ) -> Operation[dict[str, Value]]:
        """Returns the components of the average in a reply; see `_receive_average`."""
        return receive_values(reply, progress, in_place=in_place)

    def _call(self, request_id: int | None) -> CallId:
        self._session.check()
        return self._ids.new_call() if request_id is None else self._ids.call(request_id)

    def _identify(self, error: GradserveError, call: CallId, *, waits: bool = False) -> None:
        """Puts the request id on an error, so that callers can send the call again or wait on."""
        error.request_id = self._ids.request_id(call)
        if waits and isinstance(error, DeadlineExceededError):
            error.message += f"{TO_WAIT_ON} with request_id={error.request_id}"

    def _address(self, request: _NumberedRequest, call: CallId) -> None:
        """Writes the accumulator and the request id to a request."""
        # Copying into a request is much faster than passing messages to its constructor, which serializes them.
        request.accumulator.CopyFrom(self._session.ref)
        self._ids.write(request.request_id, call, self._key)

    def _gradient_fields(
        self, request: type[Message], how: Contribution, values: Mapping[str, Sent], *, has_handles: bool
    ) -> dict[str, Any]:
        """Returns the plain fields that apply and push_pull share."""
        plain = {"local_step": how.local_step, "weight": how.weight, "worker_id": self._worker_id(how)}
        fields = plain_fields(request, plain)
        # Tensors of the caller's stay on the server; what was uploaded for this call need not.
        fields["release_handles"] = not has_handles
        fields["unread_contents"] = GpuArray in map(type, values.values())
        return fields


def _in_place(copy: bool) -> bool:
    return not as_flag(copy, _COPY)
