"""Operations on accumulators of every kind: the messages they send and receive."""

from functools import partial
from typing import TypeAlias

from gradserve.calls.accumulators.components import receive_values
from gradserve.calls.accumulators.contributions import (
    OUTCOMES,
    Contribution,
    ContributionWire,
    Given,
    different_workers,
    is_in_place,
)
from gradserve.calls.accumulators.creation import delete, described
from gradserve.calls.accumulators.service import without_run
from gradserve.calls.exchange import Operation, Progress, Reply, Whole, encode_timeout
from gradserve.calls.tensors import placement_of
from gradserve.conversion.plain import as_flag, as_integer, plain_fields
from gradserve.conversion.trees import Tree
from gradserve.results import AccumulatorInfo, ApplyResult, Average, PushPullResult, Value
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2

Awaiting: TypeAlias = messages_pb2.PushPullRequest | messages_pb2.TakeGradientRequest | messages_pb2.ReadAverageRequest
"""A request of a call that waits for an average."""


class AccumulatorWire(ContributionWire):
    """The operations on one accumulator."""

    @property
    def ref(self) -> accumulator_pb2.AccumulatorRef:
        """The accumulator's name."""
        ref: accumulator_pb2.AccumulatorRef = self._session.ref
        return ref

    def apply(
        self, gradient: Tree, how: Contribution, request_id: int | None, progress: Progress | None = None
    ) -> Operation[ApplyResult]:
        """Applies a gradient: a tree of the components, or a dict by component name."""
        answer: messages_pb2.ApplyGradientResponse = yield from self._apply(gradient, how, request_id, progress)
        return ApplyResult(OUTCOMES[answer.outcome], answer.duplicate, answer.global_step, answer.num_accumulated)

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
        in_place = is_in_place(copy)
        request = messages_pb2.TakeGradientRequest(
            **plain_fields(messages_pb2.TakeGradientRequest, {"num_required": num_required}),
            timeout=encode_timeout(timeout),
        )
        with self._ids.open_calls.opened(self._key, partial(self._call, request_id)) as call:
            self._address(request, call)
            request.placement.CopyFrom(placement_of(keep=False))
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
        in_place = is_in_place(copy)

        def receive(request: messages_pb2.PushPullRequest, reply: Reply, given: Given) -> Operation[PushPullResult]:
            answer: messages_pb2.PushPullResponse = reply.message
            average = Average({}, None, answer.global_step, 0, 0.0, ())
            if answer.HasField("average"):
                average = yield from self._receive_average(request, reply, progress, in_place=in_place, given=given)
            return PushPullResult(
                **vars(average),
                outcome=OUTCOMES[answer.outcome],
                duplicate=answer.duplicate,
                global_step=answer.global_step,
            )

        return self._push_pull(
            gradient,
            how,
            timeout,
            request_id,
            progress,
            receive,
            plain={"num_required": num_required, "one_per_worker": one_per_worker},
            one_per_worker=one_per_worker,
            in_place=in_place,
        )

    def read_average(
        self, step: int | None, timeout: float, progress: Progress | None = None, *, copy: bool = True
    ) -> Operation[Average]:
        """Waits for the average of a step."""
        in_place = is_in_place(copy)
        fields = {} if step is None else plain_fields(messages_pb2.ReadAverageRequest, {"step": step})
        request = messages_pb2.ReadAverageRequest(
            accumulator=self._checked_ref(),
            **fields,
            placement=placement_of(keep=False),
            timeout=encode_timeout(timeout),
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

    def set_global_step(self, global_step: int, *, drop_gradients: bool = False) -> Operation[None]:
        """Sets the accumulator's step."""
        step = as_integer(global_step, Argument("new_global_step"))
        drops = as_flag(drop_gradients, Argument("drop_gradients"))
        request = messages_pb2.SetGlobalStepRequest(
            accumulator=self._checked_ref(), global_step=step, drop_gradients=drops
        )
        yield self._unary("SetGlobalStep", request)
        self._session.step_set(step)

    def info(self) -> Operation[AccumulatorInfo]:
        """Describes the accumulator."""
        request = messages_pb2.GetAccumulatorRequest(accumulator=self._checked_ref())
        reply: messages_pb2.GetAccumulatorResponse = yield self._unary("GetAccumulator", request)
        return described(reply.info)

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator."""
        ref = without_run(self.ref)
        deleted = (yield from delete(ref)).deleted
        self._deleted(ref.container, ref.name)
        return deleted

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
            different_workers=different_workers(message),
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
        return receive_values(reply, reply.message.average.components, progress, in_place=in_place)
