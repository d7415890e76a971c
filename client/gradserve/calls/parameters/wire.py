"""Operations on parameters: the messages they send and receive."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Sent, add_values, arrays_of, receive_values
from gradserve.calls.accumulators.contributions import OUTCOMES, Contribution, Given, is_in_place
from gradserve.calls.accumulators.service import Accepted, Method, RoundService, without_run
from gradserve.calls.accumulators.session import RoundSession
from gradserve.calls.combinators import at_target
from gradserve.calls.exchange import Operation, Progress, Reply, Whole, encode_timeout
from gradserve.calls.identity import RequestIds
from gradserve.calls.parameters.compression import Packer, unpacked
from gradserve.calls.parameters.evaluations import EvaluationsWire, as_metrics
from gradserve.calls.parameters.fields import fields_named
from gradserve.calls.parameters.model import ParameterComponents, check_saved
from gradserve.calls.parameters.spec import changed_rules, info_of, record_of, rules_message, rules_of, update_of
from gradserve.calls.tensors import call_with_arrays, placement_of, receive_results
from gradserve.codecs import Codec, packing_of
from gradserve.conversion.plain import INT64, as_integer
from gradserve.conversion.trees import Tree
from gradserve.parameter_records import ParametersInfo, PushPull, PushResult, RoundRecord, Version
from gradserve.results import Outcome
from gradserve.saved.parameters import SavedParameters, SavedState
from gradserve_protocol.argument import Argument
from gradserve_protocol.codecs import CODECS_BY_NUMBER
from gradserve_protocol.errors import GradserveError, InternalError, InvalidArgumentError, OutOfRangeError
from gradserve_protocol.messages import encode_codec
from gradserve_protocol.printing import first_items
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2, tensor_pb2

T = TypeVar("T")
_STEPS = range(INT64.stop)
_LARGEST_WEIGHT = float(np.finfo(np.float32).max)
_GET = Method("GetParameters", messages_pb2.GetParametersRequest)
_READ = Method("ReadParameters", messages_pb2.ReadParametersRequest)
_CHANGE = Method("ChangeParameters", messages_pb2.ChangeParametersRequest)
_DELETE = Method("DeleteParameters", messages_pb2.DeleteParametersRequest)
_ROUNDS = Method("ListRounds", messages_pb2.ListRoundsRequest)
_FORK = Method("ForkParameters", messages_pb2.ForkParametersRequest)


def _accepted(answer: messages_pb2.PushResponse) -> Accepted:
    """Returns what the answer to a push says, counting rounds by the steps that they lead to.

    A loaded version, too, ends a round: its updates are dropped as stale. So an update need not be kept once the step
    has grown, whatever has become of its round.
    """
    if not answer.round:
        return Accepted(0, answer.step, answer.step)
    return Accepted(answer.step + max(answer.round - answer.num_rounds, 0), answer.step, answer.step)


PARAMETERS = RoundService(
    name="ParameterService",
    subject="parameters",
    contribution="update",
    get=_GET,
    ask=_GET,
    apply=Method("Push", messages_pb2.PushRequest),
    push_pull=Method("PushPullParameters", messages_pb2.PushPullParametersRequest),
    num_ended=lambda reply: reply.info.step,
    accepted=_accepted,
    step=lambda info: info.step,
)


class ReadState(NamedTuple):
    """The newest version with the state of the optimizer.

    Attributes:
        version: The version; its components have each tensor once.
        state: The state; None if it was not asked for.
        schedule: The schedule of the parameters; None for none.
        update: The kind of their updates, "delta" or "gradient".
    """

    version: Version
    state: SavedState | None
    schedule: parameters_pb2.Schedule | None
    update: str


class ParametersWire(EvaluationsWire):
    """The operations on the parameters of one name."""

    components: ParameterComponents

    def __init__(
        self,
        session: RoundSession,
        components: ParameterComponents,
        ids: RequestIds,
        spec: parameters_pb2.ParametersSpec,
        *,
        deleted: Callable[[str, str], object],
        be_worker: Callable[[], Operation[None]],
        target: int = 0,
    ) -> None:
        has_default_workers = not spec.deterministic
        super().__init__(
            session, components, ids, has_default_workers=has_default_workers, deleted=deleted, target=target
        )
        self._be_worker = be_worker
        self._one_per_worker = not spec.many_per_worker
        self._plain: dict[str, object] = {}
        """Other fields of a push_pull."""
        self._packer = Packer(session.ref.name, components)

    def aimed(self, operation: Operation[T]) -> Operation[T]:
        """Returns an operation whose calls go to the server that has the parameters."""
        return at_target(self.target, operation) if self.target else operation

    def push(
        self,
        update: Tree,
        how: Contribution,
        request_id: int | None,
        progress: Progress | None = None,
        *,
        codec: Codec | None = None,
    ) -> Operation[PushResult]:
        """Adds an update to the round: a tree of components, or a dict by component name."""

        def send(update: Tree) -> Operation[messages_pb2.PushResponse]:
            return self._apply(update, how, request_id, progress)

        with fields_named(lambda: self.components.gradient(update)):
            answer = yield from self._sent(send, update, how, request_id, codec, lambda each: OUTCOMES[each.outcome])
        return PushResult(
            outcome=OUTCOMES[answer.outcome],
            step=answer.step,
            weight=answer.weight,
            staleness=answer.staleness,
            duplicate=answer.duplicate,
            num_updates=answer.num_updates,
        )

    def push_pull(
        self,
        update: Tree,
        how: Contribution,
        timeout: float,
        request_id: int | None,
        progress: Progress | None = None,
        *,
        copy: bool = True,
        codec: Codec | None = None,
        codec_down: Codec | None = None,
    ) -> Operation[PushPull]:
        """Adds an update, and waits for the version that its round makes."""
        in_place = is_in_place(copy)

        def receive(request: Message, reply: Reply, _given: Given) -> Operation[PushPull]:
            answer: messages_pb2.PushPullParametersResponse = reply.message
            version = yield from self._receive_version(request, reply, progress, in_place=in_place)
            return PushPull(OUTCOMES[answer.outcome], version, answer.weight, answer.staleness, answer.duplicate)

        plain = self._plain if codec_down is None else self._plain | {"codec": packing_of(codec_down).number}

        def send(update: Tree) -> Operation[PushPull]:
            return self._push_pull(
                update,
                how,
                timeout,
                request_id,
                progress,
                receive,
                plain=plain,
                one_per_worker=self._one_per_worker,
                in_place=in_place,
            )

        with fields_named(lambda: self.components.gradient(update), codec="codec_down"):
            return (yield from self._sent(send, update, how, request_id, codec, lambda each: each.outcome))

    def _sent(
        self,
        send: Callable[[Tree], Operation[T]],
        update: Tree,
        how: Contribution,
        request_id: int | None,
        codec: Codec | None,
        outcome: Callable[[T], Outcome],
    ) -> Operation[T]:
        """Sends an update of what is a worker from now on, packed if there is a codec, and notes what becomes of it."""
        yield from self._be_worker()
        if codec is None:
            return (yield from send(update))
        call = None if request_id is None else self._ids.call(request_id)
        worker_id = str(self._worker_id(how))
        values = self.components.gradient(update)
        packed = yield from self._packer.pack(values, codec, worker_id, how.local_step, call)
        with self._packer.sent(packed, call, self._ids.call) as settle:
            answer = yield from send(packed)
            settle(outcome(answer))
        return answer

    def read(
        self,
        step: int | None,
        timeout: float,
        progress: Progress | None = None,
        *,
        copy: bool = True,
        codec: Codec | None = None,
    ) -> Operation[Version]:
        """Returns a version; waits for a future one, but not for the newest."""
        in_place = is_in_place(copy)
        request = self._read_request(step, timeout, codec)
        call = self._unary(_READ.name, request, 0.0 if step is None else timeout, in_place=in_place)
        reply = yield from self._waited(Whole(call, progress=progress))
        return (yield from self._receive_version(request, reply, progress, in_place=in_place))

    def wait(self, step: int, timeout: float) -> Operation[None]:
        """Waits until a step is reached."""
        request = self._read_request(as_integer(step, Argument("step"), _STEPS), timeout)
        request.without_values = True
        try:
            reply: messages_pb2.ReadParametersResponse = yield self._unary(_READ.name, request, timeout)
        except OutOfRangeError:
            return  # it was reached, and is no longer kept
        self._learn(request, reply.version)

    def info(self) -> Operation[ParametersInfo]:
        """Describes the parameters."""
        return info_of((yield from self.described()))

    def rounds(self, since: int) -> Operation[list[RoundRecord]]:
        """Returns the records of rounds that led to a later step than this one, the oldest first."""
        found: list[RoundRecord] = []
        since = as_integer(since, Argument("since"), _STEPS)
        while True:
            request: messages_pb2.ListRoundsRequest = self._request(_ROUNDS)
            request.since = since
            reply: messages_pb2.ListRoundsResponse = yield self._unary(_ROUNDS.name, request)
            found += [record_of(each) for each in reply.rounds]
            if not (reply.has_more and reply.rounds):
                return found
            since = reply.rounds[-1].step

    def change(
        self, request: messages_pb2.ChangeParametersRequest, rules: Mapping[str, Any]
    ) -> Operation[ParametersInfo]:
        """Changes the optimizer and the schedule, as a request says, and rules by name, from the next round on."""
        call = self._call(None)
        if rules:
            present = rules_of((yield from self.described()).spec.rounds)
            request.rounds.CopyFrom(rules_message(changed_rules(present, rules)))
        self._address(request, call)
        try:
            with fields_named():
                reply: messages_pb2.ChangeParametersResponse = yield self._unary(_CHANGE.name, request)
        except GradserveError as error:
            self._identify(error, call)
            raise
        return info_of(reply.info)

    def read_state(self, progress: Progress | None = None, *, with_state: bool) -> Operation[ReadState]:
        """Returns the newest version and the state of the optimizer, as they are to be saved."""
        info = yield from self.described()
        request = self._read_request(None, 0.0)
        request.with_state = with_state
        call = self._unary(_READ.name, request, in_place=True)
        reply: Reply = yield Whole(call, progress=progress)
        version: parameters_pb2.Version = reply.message.version
        state = version.state
        tensors = [part.dense for part in version.components] + [slot.value for slot in state.slots]
        arrays = yield from receive_results(reply, tensors, progress)
        self._learn(request, version)
        names = [part.name for part in version.components]
        components = dict(zip(names, arrays, strict=False))
        slots = {
            (slot.name, slot.component): array for slot, array in zip(state.slots, arrays[len(names) :], strict=True)
        }
        steps = dict(zip(names, state.component_steps, strict=False))
        return ReadState(
            version_of(version, components, None),
            SavedState(slots, steps, state.rounds, state.optimizer) if with_state else None,
            info.spec.schedule if info.spec.HasField("schedule") else None,
            update_of(info.spec),
        )

    def load(
        self, saved: SavedParameters, progress: Progress | None = None, *, with_state: bool
    ) -> Operation[ParametersInfo]:
        """Makes saved parameters the next version."""
        info = yield from self.described()
        check_saved(saved, info.spec, self.components, with_state=with_state)
        saved.check_update(update_of(info.spec))
        call = self._call(None)
        values: dict[str, Sent] = {each.name: saved.components[each.name] for each in self.components}
        state = saved.state if with_state else None

        def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
            message = messages_pb2.ChangeParametersRequest(step=saved.step, release_handles=True)
            self._address(message, call)
            add_saved(message, values, state, tensors)
            return message

        arrays = [*arrays_of(values)[0], *(state.slots.values() if state is not None else ())]
        try:
            with fields_named(values="path"):
                reply = yield from call_with_arrays(
                    PARAMETERS.name,
                    _CHANGE.name,
                    arrays,
                    request,
                    released=True,
                    renew=self._session.renew,
                    progress=progress,
                )
        except GradserveError as error:
            self._identify(error, call)
            raise
        return info_of(reply.message.info)

    def fork(
        self, step: int | None, fork: parameters_pb2.ParametersRef, lifetime: Any
    ) -> Operation[parameters_pb2.ParametersInfo]:
        """Creates parameters that begin with a version of these; returns their description."""
        request: messages_pb2.ForkParametersRequest = self._request(_FORK)
        if step is not None:
            request.step = as_integer(step, Argument("step"), _STEPS)
        request.fork.CopyFrom(fork)
        request.lifetime.CopyFrom(lifetime)
        reply: messages_pb2.ForkParametersResponse = yield self._unary(_FORK.name, request)
        return reply.info

    def delete(self) -> Operation[bool]:
        """Deletes the parameters."""
        ref = without_run(self.ref)
        reply: messages_pb2.DeleteParametersResponse = yield self._unary(_DELETE.name, PARAMETERS.request(_DELETE, ref))
        self._deleted(ref.container, ref.name)
        return reply.deleted

    def described(self) -> Operation[parameters_pb2.ParametersInfo]:
        """Returns the description of the parameters as the server sends it."""
        reply: messages_pb2.GetParametersResponse = yield self._unary(_GET.name, self._request(_GET))
        return reply.info

    def _read_request(
        self, step: int | None, timeout: float, codec: Codec | None = None
    ) -> messages_pb2.ReadParametersRequest:
        request: messages_pb2.ReadParametersRequest = self._request(_READ)
        if codec is not None:
            request.codec = encode_codec(packing_of(codec))
        request.placement.CopyFrom(placement_of(keep=False))
        if step is not None:
            request.step = as_integer(step, Argument("step"), _STEPS)
            if (limit := encode_timeout(timeout)) is not None:
                request.timeout.CopyFrom(limit)
        return request

    def _receive_version(
        self, request: Any, reply: Reply, progress: Progress | None, *, in_place: bool
    ) -> Operation[Version]:
        message: parameters_pb2.Version = reply.message.version
        self._learn(request, message)
        values = yield from receive_values(reply, message.components, progress, in_place=in_place)
        if message.codec:
            shapes = {each.name: each.shape or () for each in self.components}
            values = yield from unpacked(self.components, values, shapes, read_only=in_place)
        missing = [each.name for each in self.components if each.name not in values]
        if missing:
            raise InternalError(f"the server sent a version without {first_items(map(repr, missing), len(missing))}")
        return version_of(message, *self.components.average(values))

    def _learn(self, request: Any, version: parameters_pb2.Version) -> None:
        self._session.learned(request, version.step, version.step)

    def _gradient_fields(
        self, request: Any, how: Contribution, values: Mapping[str, Sent], *, has_handles: bool
    ) -> dict[str, Any]:
        if has_handles and self.target:
            raise InvalidArgumentError(
                f"expected arrays, got the handle of a tensor: tensors are on server 0 of the cluster, and parameters "
                f"{self.ref.name!r} are on server {self.target}",
                field="update",
            )
        fields = super()._gradient_fields(request, how, values, has_handles=has_handles)
        if not 0 < fields["weight"] <= _LARGEST_WEIGHT:
            raise Argument("weight").error("a positive number that fits into a float32", how.weight)
        if how.metrics is not None:
            fields["metrics"] = as_metrics(how.metrics)
        return fields


def add_saved(
    message: messages_pb2.CreateParametersRequest | messages_pb2.ChangeParametersRequest,
    values: Mapping[str, Sent],
    state: SavedState | None,
    tensors: Sequence[tensor_pb2.Tensor],
) -> None:
    """Adds values of components, and the state of an optimizer, to a request.

    Args:
        message: The request.
        values: The values by name, in the order of the components.
        state: The state; None for none.
        tensors: The messages of the arrays among the values, and then of those of the state.
    """
    num_values = len(arrays_of(values)[0])
    add_values(message.values, values, tensors[:num_values])
    if state is None:
        return
    for (slot, component), tensor in zip(state.slots, tensors[num_values:], strict=True):
        message.state.slots.add(name=slot, component=component).value.CopyFrom(tensor)
    message.state.component_steps.extend([state.component_steps.get(name, 0) for name in values])
    message.state.rounds = state.rounds
    message.state.optimizer.CopyFrom(state.optimizer)


def version_of(message: parameters_pb2.Version, components: Mapping[str, Any], tree: Tree) -> Version:
    """Returns the version that a message describes, with these values by name, and as a tree."""
    return Version(
        step=message.step,
        components=components,
        tree=tree,
        digest=message.digest.hex(),
        num_updates=message.num_updates,
        total_weight=message.total_weight,
        worker_ids=tuple(message.worker_ids),
        codec=Codec(CODECS_BY_NUMBER[message.codec].name) if message.codec else None,
    )
