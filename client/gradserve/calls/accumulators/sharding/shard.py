"""Sharded accumulators: whether one is, how its servers share each gradient, and the shard of one server."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from google.protobuf.message import Message

from gradserve.calls.accumulators.components import (
    Component,
    PackedPieces,
    Sent,
    add_values,
    arrays_of,
    receive_values,
)
from gradserve.calls.combinators import at_target
from gradserve.calls.exchange import Operation, Pause, Progress, Reply, Unary, Whole
from gradserve.calls.identity import AccumulatorKey, CallId
from gradserve.calls.tensors import call_with_arrays, placement_of
from gradserve.conversion.plain import as_flag
from gradserve.results import Value
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import AnyArray, Array, host_array
from gradserve_protocol.errors import AbortedError, GradserveError, InvalidArgumentError, NotFoundError
from gradserve_protocol.placement import Piece, Plan, dense_bytes
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, parameters_messages_pb2, parameters_pb2, tensor_pb2

SMALLEST_BYTES = 1 << 20
"""The least size of the dense gradients of an accumulator that is sharded unasked.

Below it, the two round trips more cost as much as several links gain.
"""
_SHARDED = Argument("sharded")
_FIELD = "gradient"
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
Step: TypeAlias = Callable[[], Operation[None]]


def as_wish(sharded: Any) -> bool | None:
    """Returns the argument of a caller: True, False, or None for what is best.

    Raises:
        InvalidArgumentError: It is something else.
    """
    return None if sharded is None else as_flag(sharded, _SHARDED)


def is_sharded(wanted: bool | None, components: Iterable[Component], device: str | None) -> bool:
    """Returns whether to shard an accumulator over several servers.

    Args:
        wanted: What the caller wants; None for what is best.
        components: The components.
        device: The argument for the device of its sums.

    Raises:
        InvalidArgumentError: It is wanted, and not possible.
    """
    if wanted is False:
        return False
    everything = list(components)
    obstacle = _obstacle(everything, device)
    if wanted:
        if obstacle is not None:
            raise InvalidArgumentError(f"expected sharded=False or None, got True: {obstacle}", field=_SHARDED.name)
        return True
    return obstacle is None and sum(dense_bytes(each) for each in everything if not each.is_sparse) >= SMALLEST_BYTES


def _obstacle(components: list[Component], device: str | None) -> str | None:
    if device not in (None, "cpu"):
        return f"sums that are sharded are on 'cpu', and the device is {device!r}"
    for each in components:
        if each.shape is None or -1 in each.shape[each.is_sparse :] or (each.is_sparse and not each.shape):
            exception = ", but for the first size," if each.is_sparse else ""
            return f"its shapes{exception} have to be known, and {each.title} is {each}"
    return None


def plan_in(spec: accumulator_pb2.AccumulatorSpec | parameters_pb2.ParametersSpec) -> Plan:
    """Returns the plan of a sharded accumulator, or of sharded parameters."""
    return {each.name: [Piece(piece.server, piece.num_rows) for piece in each.pieces] for each in spec.components}


def remove_plan(spec: parameters_pb2.ParametersSpec) -> None:
    """Makes the spec of sharded parameters that of parameters on one server."""
    spec.num_shards = 0
    for component in spec.components:
        component.ClearField("pieces")


def add_plan(
    spec: accumulator_pb2.AccumulatorSpec | parameters_pb2.ParametersSpec, plan: Plan, num_servers: int
) -> None:
    """Makes the spec of an accumulator, or of parameters, that of one that is sharded."""
    spec.num_shards = num_servers
    if isinstance(spec, accumulator_pb2.AccumulatorSpec):
        spec.device = "cpu"
    for component in spec.components:
        for server, num_rows in plan[component.name]:
            component.pieces.add(server=server, num_rows=num_rows)


class _Rows(NamedTuple):
    """Rows of a component, from `start` up to `stop`; the whole component if that is None."""

    start: int
    stop: int | None


class Parts:
    """Each server's part of the gradients and averages of an accumulator.

    Attributes:
        servers: The indexes of the servers that have something, in ascending order.
    """

    def __init__(self, components: Iterable[Component], plan: Plan, field: str = _FIELD) -> None:
        """`field` is the field of requests with the gradient."""
        self._field_name = field
        self._components = {each.name: each for each in components}
        self._rows: dict[int, dict[str, _Rows]] = {}
        for name in self._components:
            start = 0
            for server, num_rows in plan[name]:
                rows = _Rows(start, start + num_rows if num_rows else None)
                self._rows.setdefault(server, {})[name] = rows
                start += num_rows
        self.servers = sorted(self._rows)
        self._divided = [name for name, pieces in plan.items() if len(pieces) > 1]
        self._num_bytes = {
            server: sum(map(self._dense_bytes, rows, rows.values())) for server, rows in self._rows.items()
        }

    def num_bytes(self, server: int) -> int:
        """Returns the size of the dense tensors that a server has."""
        return self._num_bytes[server]

    def of_gradient(self, values: Mapping[str, Sent]) -> dict[int, dict[str, Sent]]:
        """Returns what each server gets of a gradient; rows of host memory are views.

        Args:
            values: The gradient: an array for each dense component, IndexedSlices for each sparse one. Components may
                be missing.

        Raises:
            InvalidArgumentError: An array has not the shape of its component.
        """
        self._check_shapes(values)
        on_host = {
            name: host_array(cast("AnyArray", values[name]))
            for name in self._divided
            if name in values and not isinstance(values[name], PackedPieces)
        }

        def part(name: str, server: int, start: int, stop: int | None) -> Sent:
            value = values[name]
            if isinstance(value, PackedPieces):
                return value.pieces[server]
            return value if stop is None else on_host[name][start:stop]

        return {
            server: {name: part(name, server, *of_server) for name, of_server in rows.items() if name in values}
            for server, rows in self._rows.items()
        }

    def rows_of(self, name: str, array: Array) -> dict[int, Array]:
        """Returns the rows of a component that each server has, in their order."""
        return {
            server: array if rows[name].stop is None else array[rows[name].start : rows[name].stop]
            for server, rows in self._rows.items()
            if name in rows
        }

    def shapes_at(self, server: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of what a server has of each of its components."""
        shapes = {}
        for name, (start, stop) in self._rows[server].items():
            shape = self._components[name].shape or ()
            shapes[name] = shape if stop is None else (stop - start, *shape[1:])
        return shapes

    def put_together(self, received: Mapping[int, Mapping[str, Value]], *, read_only: bool) -> dict[str, Value]:
        """Returns a whole average.

        Args:
            received: What each server has of it, by component. Components may be missing, on all servers.
            read_only: Whether arrays that are made for it are read-only, like those that were received.
        """
        values = {
            name: value for part in received.values() for name, value in part.items() if name not in self._divided
        }
        for name in self._divided:
            component, of_name = self._components[name], [server for server in self._rows if name in received[server]]
            if not of_name:
                continue
            whole = np.empty(component.shape or (), cast("AnyArray", received[of_name[0]][name]).dtype)
            for server in of_name:
                rows = self._rows[server][name]
                whole[rows.start : rows.stop] = received[server][name]
            whole.flags.writeable = not read_only
            values[name] = whole
        return values

    def name_field(self, server: int, error: GradserveError) -> None:
        """Makes the field of an error name a component by its place in the whole gradient."""
        start, bracket, rest = (error.field or "").partition("[")
        place, _, after = rest.partition("]")
        if start == self._field_name and bracket and place.isdecimal() and int(place) < len(self._rows[server]):
            error.field = self._field(list(self._rows[server])[int(place)]) + after

    def _field(self, name: str) -> str:
        return f"{self._field_name}[{list(self._components).index(name)}]"

    def _dense_bytes(self, name: str, rows: _Rows) -> int:
        component = self._components[name]
        if component.is_sparse:
            return 0
        if rows.stop is None or not component.shape:
            return dense_bytes(component)
        return dense_bytes(component) // component.shape[0] * (rows.stop - rows.start)

    def _check_shapes(self, values: Mapping[str, Sent]) -> None:
        """Checks the shapes of dense components, with the message of a server that has them as a whole."""
        for name, component in self._components.items():
            if component.is_sparse or name not in values:
                continue
            shape = cast("AnyArray", values[name]).shape
            if shape != component.shape:
                raise InvalidArgumentError(
                    f"Shape mismatch: expected {_shape_text(component.shape or ())}, got {_shape_text(shape)}",
                    field=f"{self._field(name)}.dense.shape",
                    code="GS_SHAPE_MISMATCH",
                )


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


Staging: TypeAlias = messages_pb2.StageGradientRequest | parameters_messages_pb2.StageUpdateRequest


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

    def address(self, staging: Staging, accumulator: AccumulatorKey, target: int) -> None:
        """Writes to a request which gradients a server may forget; not its own, which may count this time."""
        calls = self._withdrawn.get((accumulator, target))
        if calls:
            client_id = staging.request_id.client_id
            calls.pop(CallId(client_id, staging.request_id.sequence), None)
            staging.withdrawn.extend([each.sequence for each in list(calls) if each.client_id == client_id])

    def answered(
        self,
        staging: Staging,
        accumulator: AccumulatorKey,
        target: int,
        *,
        asks: bool,
    ) -> None:
        """Notes that a server has answered a request, and whether it asks about old gradients."""
        place = (accumulator, target)
        calls = self._withdrawn.get(place)
        if calls is not None:
            for number in staging.withdrawn:
                calls.pop(CallId(staging.request_id.client_id, number), None)
            if not calls:
                self._withdrawn.pop(place, None)
        if asks:
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
            add_values(message.gradient, values, tensors)
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
        request = messages_pb2.ReduceGradientsRequest(placement=placement_of(keep=False))
        request.accumulator.CopyFrom(self.ref)
        request.average.CopyFrom(average)
        call = Unary(_SERVICE, "ReduceGradients", request, in_place=in_place)
        reply: Reply = yield Whole(call, progress=progress, reply_bytes=num_bytes)
        return (yield from receive_values(reply, reply.message.average.components, progress, in_place=in_place))

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
            code="GS_SHARD_LOST",
        )


def _reply(call: Unary) -> Operation[Message]:
    reply: Message = yield call
    return reply
