"""One server's shard of an accumulator, as a client uses it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Sent, add_gradient, arrays_of, receive_values
from gradserve.calls.combinators import at_target
from gradserve.calls.exchange import Operation, Pause, Reply, Unary, Whole
from gradserve.calls.identity import AccumulatorKey, CallId
from gradserve.calls.progress import Progress
from gradserve.calls.tensors import call_with_arrays, placement_of
from gradserve.results import Value
from gradserve_protocol.errors import AbortedError, GradserveError, NotFoundError
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2

_MOST_WITHDRAWN = 1024
_Place: TypeAlias = tuple[AccumulatorKey, int]
"""An accumulator, and the index of a server."""
LOST_FIELD = "average.parts.part_ids"
"""The field of the error of a server that does not have all gradients of a round."""
PATIENCE_SECONDS = 5.0
"""The seconds for which a client waits for others to resend the gradients of a round that a server has lost."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_SERVICE = "AccumulatorService"
_AUTO = placement_of(keep=False)
Step: TypeAlias = Callable[[], Operation[None]]


class Uncounted:
    """The earlier gradients of one client that servers may forget; its next gradient tells them.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._withdrawn: dict[_Place, dict[CallId, None]] = {}
        self._asking: dict[_Place, None] = {}

    def withdraw(self, accumulator: AccumulatorKey, targets: Iterable[int], call: CallId) -> None:
        """Notes that the gradient of a call, which was staged on some servers, does not count, as the home has said."""
        for target in targets:
            calls = self._withdrawn.setdefault((accumulator, target), {})
            calls[call] = None
            for earliest in list(calls)[:-_MOST_WITHDRAWN]:
                calls.pop(earliest, None)

    def address(self, staging: messages_pb2.StageGradientRequest, accumulator: AccumulatorKey, target: int) -> None:
        """Writes to a request which gradients a server may forget; not its own, which may count this time."""
        calls = self._withdrawn.get((accumulator, target))
        if calls:
            client_id = staging.request_id.client_id
            calls.pop(CallId(client_id, staging.request_id.sequence), None)
            staging.withdrawn.extend([each.sequence for each in list(calls) if each.client_id == client_id])

    def answered(
        self,
        staging: messages_pb2.StageGradientRequest,
        reply: messages_pb2.StageGradientResponse,
        accumulator: AccumulatorKey,
        target: int,
    ) -> None:
        """Notes that a server has answered a request."""
        place = (accumulator, target)
        calls = self._withdrawn.get(place)
        if calls is not None:
            for number in staging.withdrawn:
                calls.pop(CallId(staging.request_id.client_id, number), None)
            if not calls:
                self._withdrawn.pop(place, None)
        if reply.has_old_gradients:
            self._asking[place] = None

    def take_asking(self, accumulator: AccumulatorKey) -> Collection[int]:
        """Returns the servers that ask whether old gradients count, since the last call."""
        found = [target for of, target in list(self._asking) if of == accumulator]
        for target in found:
            self._asking.pop((accumulator, target), None)
        return found


def is_of_earlier(error: GradserveError) -> bool:
    """Returns True if a server refused a call because it knows a later accumulator of this name."""
    return isinstance(error, AbortedError) and (error.field or "").rpartition(".")[2] == "home_incarnation"


class Shard:
    """The part of an accumulator that one server has.

    Attributes:
        target: The index of the server.
        ref: The accumulator's name there.
    """

    def __init__(
        self,
        ref: accumulator_pb2.AccumulatorRef,
        target: int,
        is_there: Callable[[str], Operation[bool]],
        restore: Callable[[str], Operation[None]],
    ) -> None:
        """Takes the accumulator's name with the member of the cluster, the server, and what makes the part again.

        Args:
            ref: The accumulator's name, with the member of the cluster and without incarnations.
            target: The index of the server.
            is_there: Asks the home whether it still has an incarnation of the accumulator. It raises NotFoundError
                if it has none of which the client knows.
            restore: Makes the part of an incarnation again after the server has lost it.
        """
        self.target = target
        self.ref = ref
        self._is_there = is_there
        self._restore = restore

    def stage(
        self,
        staging: messages_pb2.StageGradientRequest,
        values: Mapping[str, Sent],
        progress: Progress | None = None,
    ) -> Operation[messages_pb2.StageGradientResponse | None]:
        """Sends the server its part of a gradient; returns None if the home has another incarnation by then.

        Args:
            staging: The request, without the accumulator and the gradient.
            values: What the server gets, by component.
            progress: Told how many bytes were moved.
        """

        def request(tensors: Sequence[tensor_pb2.Tensor]) -> messages_pb2.StageGradientRequest:
            message = messages_pb2.StageGradientRequest()
            message.CopyFrom(staging)
            message.accumulator.CopyFrom(self.ref)
            add_gradient(message, values, tensors)
            return message

        arrays, _ = arrays_of(values)

        def staged() -> Operation[messages_pb2.StageGradientResponse]:
            call = call_with_arrays(_SERVICE, "StageGradient", arrays, request, released=True, progress=progress)
            reply = yield from at_target(self.target, call)
            response: messages_pb2.StageGradientResponse = reply.message
            return response

        incarnation = staging.home_incarnation
        try:
            return (yield from staged())
        except AbortedError as error:
            if not is_of_earlier(error) or (yield from self._is_there(incarnation)):
                raise
        except NotFoundError:
            if (yield from self._is_made_again(incarnation)):
                try:
                    return (yield from staged())
                except (NotFoundError, AbortedError):
                    if (yield from self._is_there(incarnation)):
                        raise
        return None

    def forget(self, incarnation: str, answer: messages_pb2.EndEpochResponse) -> Operation[None]:
        """Has the server forget the gradients that were staged in earlier epochs and do not count.

        Args:
            incarnation: The incarnation of the accumulator at its home.
            answer: What the home has said of the gradients that count.
        """
        request = messages_pb2.ForgetGradientsRequest(
            accumulator=self.ref, home_incarnation=incarnation, epoch=answer.epoch, part_ids=answer.part_ids
        )
        try:
            yield from at_target(self.target, _reply(Unary(_SERVICE, "ForgetGradients", request)))
        except (NotFoundError, AbortedError):
            return  # the server was started again, and holds nothing, or has a later accumulator

    def reduce(
        self,
        average: accumulator_pb2.Average,
        num_bytes: int,
        progress: Progress | None = None,
        *,
        again: Step | None,
        patience: float,
        in_place: bool,
    ) -> Operation[dict[str, Value]]:
        """Returns what the server has of an average, by component.

        Args:
            average: What the home has answered.
            num_bytes: The size of its dense tensors there.
            progress: Told how many bytes were moved.
            again: Stages the caller's own gradient there again, if it has one in the round.
            patience: How many seconds to wait for others to do the same.
            in_place: Whether arrays may be read-only memory of the server.

        Raises:
            AbortedError: The server has lost a gradient of the round, and did not get it again.
        """
        left, pause = patience, _FIRST_PAUSE_SECONDS
        is_first = True
        while True:
            failure: GradserveError
            try:
                reduced = self._reduce(average, num_bytes, progress, in_place=in_place)
                return (yield from at_target(self.target, reduced))
            except AbortedError as error:
                if is_of_earlier(error) and not (yield from self._is_there(average.parts.home_incarnation)):
                    raise self._lost(average) from error
                if error.field != LOST_FIELD:
                    raise
                failure = error
            except NotFoundError as error:
                if not (yield from self._is_made_again(average.parts.home_incarnation)):
                    raise self._lost(average) from error
                failure = error
            if left <= 0 and (again is None or not is_first):
                raise self._lost(average) from failure
            if again is not None and (is_first or isinstance(failure, NotFoundError)):
                yield from again()
            if again is None or not is_first:
                pause = min(pause, left)
                yield Pause(pause)
                left, pause = left - pause, min(2 * pause, _LONGEST_PAUSE_SECONDS)
            is_first = False

    def _reduce(
        self, average: accumulator_pb2.Average, num_bytes: int, progress: Progress | None, *, in_place: bool
    ) -> Operation[dict[str, Value]]:
        request = messages_pb2.ReduceGradientsRequest(placement=_AUTO)
        request.accumulator.CopyFrom(self.ref)
        request.average.CopyFrom(average)
        call = Unary(_SERVICE, "ReduceGradients", request, in_place=in_place)
        reply: Reply = yield Whole(call, progress=progress, reply_bytes=num_bytes)
        return (yield from receive_values(reply, progress, in_place=in_place))

    def _is_made_again(self, incarnation: str) -> Operation[bool]:
        """Makes the part again after the server has lost it; returns False if the home has another incarnation now."""
        if not (yield from self._is_there(incarnation)):
            return False
        try:
            yield from self._restore(incarnation)
        except AbortedError as error:
            if not is_of_earlier(error) or (yield from self._is_there(incarnation)):
                raise
            return False
        return True

    def _lost(self, average: accumulator_pb2.Average) -> AbortedError:
        return AbortedError(
            f"server {self.target} of the cluster has lost gradients of round {average.round} of accumulator "
            f"'{self.ref.container}/{self.ref.name}', and not all of them were sent again: there is no average of this "
            f"round. Go on with the next one, with local_step={average.step}",
            field=LOST_FIELD,
        )


def _reply(call: Unary) -> Operation[Message]:
    reply: Message = yield call
    return reply
