"""The operations on parameters that are sharded over several servers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Sent, add_values, arrays_of, receive_values
from gradserve.calls.accumulators.contributions import Given, is_in_place
from gradserve.calls.accumulators.service import Method, without_run
from gradserve.calls.accumulators.sharding.shard import Parts
from gradserve.calls.accumulators.sharding.staging import (
    EPOCH_FIELD,
    StagedFor,
    StagingWire,
    received_together,
    sent_together,
)
from gradserve.calls.combinators import all_ended, at_target, together
from gradserve.calls.exchange import Operation, Progress, Reply, Unary, Whole, Work
from gradserve.calls.parameters.compression import Packer, unpacked
from gradserve.calls.parameters.fields import fields_named
from gradserve.calls.parameters.model import check_saved
from gradserve.calls.parameters.spec import info_of, update_of
from gradserve.calls.parameters.wire import PARAMETERS, ParametersWire, ReadState, add_saved, version_of
from gradserve.calls.tensors import call_with_arrays, placement_of, receive_results
from gradserve.codecs import Codec
from gradserve.parameter_records import ParametersInfo, Version
from gradserve.results import Value
from gradserve.saved.parameters import SavedParameters, SavedState
from gradserve_protocol.arrays import Array
from gradserve_protocol.digest import digest_of
from gradserve_protocol.errors import (
    AbortedError,
    GradserveError,
    LostError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from gradserve_protocol.v1 import codecs_pb2, parameters_pb2, tensor_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2

NOT_STAGED_FIELD = "update"
"""The field of the error of a home that does not hold the update of a call."""
_BEHIND_FIELD = "decided"
"""The field of the error of a server that lacks rounds before those of a request."""
_DELETE = Method("DeleteParameters", messages_pb2.DeleteParametersRequest)
_MOST_TRIES = 100

CreateShard = Callable[[int, str, Mapping[str, Sent]], Operation[object]]
"""Creates the shard of a server, of an incarnation at the home, with values."""


class ShardedParametersWire(StagingWire, ParametersWire):
    """The operations on sharded parameters.

    Their home decides about rounds. Each server gets its pieces of an update before that, and makes its pieces of the
    version from what the home has decided, when it is read.
    """

    def __init__(self, *args: Any, members: Mapping[int, str], create_shard: CreateShard, **kwargs: Any) -> None:
        """Takes the parameters, and the parts of the servers.

        Args:
            *args: See `StagingWire`.
            members: The servers that have a part, as requests name them.
            create_shard: Creates the shard of a server that has lost it.
            **kwargs: See `StagingWire`.
        """
        super().__init__(*args, **kwargs)
        self._members = members
        self._create_shard = create_shard
        self._plain = {"without_values": True}
        self._packer = Packer(self.ref.name, self.components, self._parts.rows_of)

    def aimed(self, operation: Operation[Any]) -> Operation[Any]:
        """Returns the operation itself, whose calls go to several servers."""
        return operation

    def info(self) -> Operation[ParametersInfo]:
        """Describes the parameters, with the memory that they use on all servers, and without a digest."""
        found = yield from super().info()
        others = yield from all_ended(*[self._described(target) for target in self._others])
        num_bytes = found.num_bytes + sum([each.num_bytes for each in others if each is not None])
        return replace(found, num_bytes=num_bytes, digest="")

    def delete(self) -> Operation[bool]:
        """Deletes the parameters: first at their home, so that nobody reads a version of which a part is gone."""
        ref = without_run(self.ref)
        reply: messages_pb2.DeleteParametersResponse = yield self._unary(_DELETE.name, PARAMETERS.request(_DELETE, ref))
        yield from all_ended(
            *[at_target(target, self._deleted_shard(target, reply.home_incarnation)) for target in self._others]
        )
        self._deleted(ref.container, ref.name)
        return reply.deleted

    def read_state(self, progress: Progress | None = None, *, with_state: bool) -> Operation[ReadState]:
        """Returns the newest version and the state of the optimizer, as they are to be saved."""
        info = yield from self.described()
        for _ in range(_MOST_TRIES):
            at_home = yield from self._read_part(self.target, (), with_state=with_state)
            version: parameters_pb2.Version = at_home.version
            decided = [version.decided] if version.HasField("decided") else []
            others = yield from together(
                *[self._caught_up(target, version, decided, with_state=with_state) for target in self._others]
            )
            found = {self.target: at_home, **dict(zip(self._others, others, strict=True))}
            if all(each.version.step == version.step for each in found.values()):
                return self._put_together(found, info, with_state=with_state)
        raise UnavailableError(
            f"rounds of parameters {self.ref.name!r} ended faster than the state of the optimizer could be read from "
            "all servers: try again"
        )

    def load(
        self, saved: SavedParameters, progress: Progress | None = None, *, with_state: bool
    ) -> Operation[ParametersInfo]:
        """Makes saved parameters the next version."""
        info = yield from self.described()
        check_saved(saved, info.spec, self.components, with_state=with_state)
        saved.check_update(update_of(info.spec))
        call = self._call(None)
        values = self._parts.of_gradient({each.name: saved.components[each.name] for each in self.components})
        states = parts_of_state(self._parts, saved.state if with_state else None)

        def load_at(target: int, progress: Progress | None) -> Operation[Reply]:
            def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
                message = messages_pb2.ChangeParametersRequest(step=saved.step, release_handles=True)
                self._address(message, call)
                message.parameters.CopyFrom(self.ref if target == self.target else self._shard_ref(target))
                add_saved(message, values[target], states.get(target), tensors)
                return message

            arrays = [*arrays_of(values[target])[0], *(states[target].slots.values() if target in states else ())]
            renew = self._session.renew if target == self.target else None
            sent = call_with_arrays(
                PARAMETERS.name, "ChangeParameters", arrays, request, released=True, renew=renew, progress=progress
            )
            return at_target(target, sent)

        def held_at(target: int, progress: Progress | None) -> Operation[Reply]:
            try:
                return (yield from load_at(target, progress))
            except NotFoundError:  # the server has lost its shard
                yield from self._create_shard(target, self.ref.incarnation, values[target])
                return (yield from load_at(target, None))

        try:
            with fields_named(values="path"):
                num_bytes = sum([array.nbytes for each in values.values() for array in arrays_of(each)[0]])
                yield from sent_together(progress, num_bytes, [partial(held_at, target) for target in self._others])
                reply = yield from load_at(self.target, None)
        except GradserveError as error:
            self._identify(error, call)
            raise
        loaded = info_of(reply.message.info)
        with suppress(OutOfRangeError):  # later rounds have ended, and others bring them to the servers
            yield from self._receive_parts((yield from self._version_at(loaded.step)), None, in_place=True)
        return replace(loaded, digest="")

    # Updates

    def _use(self, target: int) -> Operation[object]:
        return self._described(target)

    def _is_to_stage_again(self, error: AbortedError) -> Operation[bool]:
        if error.field == EPOCH_FIELD:
            self._session.epoch = (yield from self.described()).epoch
            return True
        return error.field == NOT_STAGED_FIELD  # the home has been started again, and has lost it

    def _stage_at(
        self, target: int, given: Given, values: Mapping[str, Sent], staged: StagedFor, progress: Progress | None
    ) -> Operation[Message | None]:
        staging = messages_pb2.StageUpdateRequest(local_step=given.local_step, release_handles=True, epoch=staged.epoch)
        staging.parameters.CopyFrom(self._shard_ref(target))
        staging.parameters.incarnation = staged.incarnation
        staging.request_id.client_id, staging.request_id.sequence = given.call
        self._uncounted.address(staging, self._key, target)

        def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
            message = messages_pb2.StageUpdateRequest()
            message.CopyFrom(staging)
            add_values(message.update, values, tensors)
            return message

        sent = call_with_arrays(
            PARAMETERS.name, "StageUpdate", arrays_of(values)[0], request, released=True, progress=progress
        )
        try:
            reply = yield from at_target(target, sent)
        except NotFoundError as error:
            raise (yield from self._lost(target)) from error
        except GradserveError as error:
            self._parts.name_field(target, error)
            raise
        self._uncounted.answered(staging, self._key, target, asks=reply.message.has_old_updates)
        measured: Message | None = reply.message.measured if reply.message.HasField("measured") else None
        return measured

    def _tell(self, message: Any, staged: StagedFor) -> None:
        super()._tell(message, staged)
        del message.measured[:]
        message.measured.extend(staged.answers)

    def _forget_uncounted(self, targets: Collection[int]) -> Operation[None]:
        """Ends the epoch, and tries to have servers forget what was staged in it and does not count."""
        asked = messages_pb2.CountUpdatesRequest(parameters=self.ref)
        with suppress(GradserveError):
            answer: messages_pb2.CountUpdatesResponse = yield self._unary("CountUpdates", asked)
            self._session.epoch = max(self._session.epoch, answer.epoch)
            yield from all_ended(*[at_target(target, self._forgotten(target, answer)) for target in targets])

    def _forgotten(self, target: int, answer: messages_pb2.CountUpdatesResponse) -> Operation[None]:
        request = messages_pb2.ForgetUpdatesRequest(
            parameters=self._shard_ref(target), epoch=answer.epoch, part_ids=answer.part_ids
        )
        with suppress(NotFoundError):
            yield Unary(PARAMETERS.name, "ForgetUpdates", request)

    # Versions

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
        # Its number keeps the version at the home until all servers have sent their pieces.
        with self._ids.open_calls.opened(self._key, self._ids.new_call, may_come_again=False) as call:
            request = self._read_request(step, timeout, codec)
            self._address(request, call)
            asked = self._unary("ReadParameters", request, 0.0 if step is None else timeout)
            reply = yield from self._waited(Whole(asked))
            return (yield from self._receive_version(request, reply, progress, in_place=in_place))

    def _read_request(
        self, step: int | None, timeout: float, codec: Codec | None = None
    ) -> messages_pb2.ReadParametersRequest:
        request = super()._read_request(step, timeout, codec)
        request.without_values = True
        return request

    def _receive_version(
        self, request: Any, reply: Reply, progress: Progress | None, *, in_place: bool
    ) -> Operation[Version]:
        message: parameters_pb2.Version = reply.message.version
        self._learn(request, message)
        codec: codecs_pb2.Codec = request.codec
        values = yield from self._receive_parts(message, progress, in_place=in_place, codec=codec)
        message.codec = codec
        if codec:  # only servers have the values that the version's digest is of
            message.ClearField("digest")
        else:
            in_order = [cast("Array", values[each.name]) for each in self.components]
            message.digest = yield Work(lambda: digest_of(in_order))  # instead of that of the home's pieces
        return version_of(message, *self.components.average(values))

    def _receive_parts(
        self,
        version: parameters_pb2.Version,
        progress: Progress | None,
        *,
        in_place: bool,
        codec: codecs_pb2.Codec = codecs_pb2.CODEC_UNSPECIFIED,
    ) -> Operation[dict[str, Value]]:
        read = partial(self._read_shard, version, in_place=in_place, codec=codec)
        received = yield from received_together(progress, [partial(read, each) for each in self._parts.servers])
        return self._parts.put_together(dict(zip(self._parts.servers, received, strict=True)), read_only=in_place)

    def _read_shard(
        self,
        version: parameters_pb2.Version,
        target: int,
        progress: Progress | None,
        *,
        in_place: bool,
        codec: codecs_pb2.Codec,
    ) -> Operation[dict[str, Value]]:
        decided = [version.decided] if version.HasField("decided") else []
        read = partial(self._read_call_of, target, version.step, in_place=in_place, progress=progress, codec=codec)
        reply = yield from self._following(target, version.step, decided, read)
        values = yield from receive_values(reply, reply.message.version.components, progress, in_place=in_place)
        if codec:
            shapes = self._parts.shapes_at(target)
            values = yield from unpacked(self.components, values, shapes, read_only=in_place)
        return values

    def _read_call_of(
        self,
        target: int,
        step: int | None,
        decided: Sequence[parameters_pb2.DecidedRound],
        *,
        in_place: bool,
        progress: Progress | None = None,
        with_state: bool = False,
        optimizer: parameters_pb2.Optimizer | None = None,
        codec: codecs_pb2.Codec = codecs_pb2.CODEC_UNSPECIFIED,
    ) -> Operation[Reply]:
        request = messages_pb2.ReadParametersRequest(
            parameters=self._shard_ref(target), placement=placement_of(keep=False), with_state=with_state, codec=codec
        )
        if step is not None:
            request.step = step
        if optimizer is not None:
            request.state_optimizer.CopyFrom(optimizer)
        if target != self.target:
            request.decided.extend(decided)
        call = Unary(PARAMETERS.name, "ReadParameters", request, in_place=in_place)
        reply_bytes = self._parts.num_bytes(target)
        return at_target(target, _reply(Whole(call, progress=progress, reply_bytes=reply_bytes)))

    def _following(
        self,
        target: int,
        step: int,
        decided: Sequence[parameters_pb2.DecidedRound],
        read: Callable[[Sequence[parameters_pb2.DecidedRound]], Operation[Reply]],
    ) -> Operation[Reply]:
        """Makes a call to a server with the rounds that it needs; if it lacks earlier ones, brings it these first."""
        while True:
            try:
                return (yield from read(decided))
            except NotFoundError as error:
                raise (yield from self._lost(target)) from error
            except AbortedError as error:
                if error.field != _BEHIND_FIELD:
                    raise
                described = yield from self._described(target)
                if described is None:
                    raise (yield from self._lost(target)) from error
                if described.step >= step:
                    continue  # another client has brought it these rounds in the meantime
                earlier = yield from self._decided_since(described.step, step)
                if not earlier or (earlier[0].step != described.step + 1 and not any(each.loaded for each in earlier)):
                    raise LostError(
                        f"server {target} of the cluster has parameters '{self.ref.container}/{self.ref.name}' at step "
                        f"{described.step}, and their home has no record of the round after it: load a saved version",
                        accumulator=self.ref.name,
                        num_gradients=0,
                    ) from error
                if decided and earlier[-1].step == decided[-1].step:
                    earlier[-1] = decided[-1]  # which also says which versions the home keeps now
                decided = earlier

    def _decided_since(self, since: int, up_to: int) -> Operation[list[parameters_pb2.DecidedRound]]:
        found: list[parameters_pb2.DecidedRound] = []
        while since < up_to:
            request = messages_pb2.ListRoundsRequest(parameters=self.ref, since=since)
            reply: messages_pb2.ListRoundsResponse = yield self._unary("ListRounds", request)
            found += [each.decided for each in reply.rounds if each.step <= up_to]
            if not reply.has_more or not reply.rounds:
                break
            since = reply.rounds[-1].step
        return found

    def _version_at(self, step: int) -> Operation[parameters_pb2.Version]:
        request = self._read_request(step, 0.0)
        reply: messages_pb2.ReadParametersResponse = yield self._unary("ReadParameters", request)
        return reply.version

    # States

    def _read_part(
        self,
        target: int,
        decided: Sequence[parameters_pb2.DecidedRound],
        *,
        with_state: bool,
        optimizer: parameters_pb2.Optimizer | None = None,
    ) -> "Operation[_PartOfState]":
        reply = yield from self._read_call_of(
            target, None, decided, in_place=True, with_state=with_state, optimizer=optimizer
        )
        version: parameters_pb2.Version = reply.message.version
        tensors = [part.dense for part in version.components] + [slot.value for slot in version.state.slots]
        arrays = yield from receive_results(reply, tensors, None)
        return _PartOfState(version, arrays)

    def _caught_up(
        self,
        target: int,
        version: parameters_pb2.Version,
        decided: Sequence[parameters_pb2.DecidedRound],
        *,
        with_state: bool,
    ) -> "Operation[_PartOfState]":
        found: list[_PartOfState] = []

        optimizer = version.state.optimizer if with_state else None

        def read(rounds: Sequence[parameters_pb2.DecidedRound]) -> Operation[Any]:
            found.append((yield from self._read_part(target, rounds, with_state=with_state, optimizer=optimizer)))

        yield from self._following(target, version.step, decided, read)
        return found[-1]

    def _put_together(
        self, found: "Mapping[int, _PartOfState]", info: parameters_pb2.ParametersInfo, *, with_state: bool
    ) -> ReadState:
        version = found[self.target].version
        values = self._parts.put_together({target: each.values for target, each in found.items()}, read_only=True)
        components = {each.name: cast("Array", values[each.name]) for each in self.components}
        whole = parameters_pb2.Version(
            step=version.step,
            num_updates=version.num_updates,
            total_weight=version.total_weight,
            worker_ids=version.worker_ids,
            digest=digest_of(components.values()),
        )
        state = None
        if with_state:
            slots: dict[tuple[str, str], Any] = {}
            names = dict.fromkeys([slot.name for each in found.values() for slot in each.version.state.slots])
            for name in names:
                of_slot = {target: each.slots(name) for target, each in found.items()}
                joined = self._parts.put_together(of_slot, read_only=True)
                slots |= {(name, component): array for component, array in joined.items()}
            in_order = {
                (slot, each.name): slots[slot, each.name]
                for each in self.components
                for slot in names
                if (slot, each.name) in slots
            }
            steps = {name: count for each in found.values() for name, count in each.component_steps.items()}
            at_home = version.state
            state = SavedState(
                in_order, {each.name: steps[each.name] for each in self.components}, at_home.rounds, at_home.optimizer
            )
        schedule = info.spec.schedule if info.spec.HasField("schedule") else None
        return ReadState(version_of(whole, components, None), state, schedule, update_of(info.spec))

    # Shards

    def _shard_ref(self, target: int) -> parameters_pb2.ParametersRef:
        """Returns the name of the parameters on a server, whichever run of it that is."""
        return parameters_pb2.ParametersRef(
            container=self.ref.container,
            name=self.ref.name,
            incarnation=self.ref.incarnation,
            member=self._members[target],
        )

    def _described(self, target: int) -> Operation[parameters_pb2.ParametersInfo | None]:
        """Describes the shard of a server; returns None if it has none."""
        try:
            found: parameters_pb2.ParametersInfo = yield from at_target(
                target, PARAMETERS.described(self._shard_ref(target))
            )
        except NotFoundError:
            return None
        return found

    def _deleted_shard(self, target: int, home_incarnation: str) -> Operation[None]:
        ref = self._shard_ref(target)
        ref.incarnation = ""
        request = messages_pb2.DeleteParametersRequest(parameters=ref, home_incarnation=home_incarnation)
        yield Unary(PARAMETERS.name, _DELETE.name, request)

    def _lost(self, target: int) -> Operation[GradserveError]:
        """Returns the error for a server that has no shard: the parameters were deleted, or it has lost its shard."""
        try:
            yield from self.described()
        except GradserveError as error:
            return error
        return LostError(
            f"server {target} of the cluster was started again, and has lost its shard of parameters "
            f"'{self.ref.container}/{self.ref.name}', as durability 'none' says: load a saved version, or delete them "
            "and create them again",
            accumulator=self.ref.name,
            num_gradients=0,
        )


def parts_of_state(parts: Parts, state: SavedState | None) -> dict[int, SavedState]:
    """Returns each server's part of the state of an optimizer; nothing without a state."""
    if state is None:
        return {}
    by_slot: dict[str, dict[str, Any]] = {}
    for (slot, component), array in state.slots.items():
        by_slot.setdefault(slot, {})[component] = array
    slots: dict[int, dict[tuple[str, str], Any]] = {target: {} for target in parts.servers}
    for slot, arrays in by_slot.items():
        for target, values in parts.of_gradient(arrays).items():
            slots[target] |= {(slot, component): value for component, value in values.items()}
    return {target: replace(state, slots=of_target) for target, of_target in slots.items()}


class _PartOfState:
    """One server's part of a version and of the state of its optimizer."""

    def __init__(self, version: parameters_pb2.Version, arrays: Sequence[Any]) -> None:
        self.version = version
        names = [part.name for part in version.components]
        self.values: dict[str, Any] = dict(zip(names, arrays, strict=False))
        self.component_steps = dict(zip(names, version.state.component_steps, strict=False))
        self._slots = list(zip(version.state.slots, arrays[len(names) :], strict=True))

    def slots(self, name: str) -> dict[str, Any]:
        """Returns the arrays of a slot by component."""
        return {slot.component: array for slot, array in self._slots if slot.name == name}


def _reply(call: Whole) -> Operation[Reply]:
    reply: Reply = yield call
    return reply
