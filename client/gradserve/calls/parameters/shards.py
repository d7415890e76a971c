"""The shards of parameters that several servers have together: their parts of updates, versions and states."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Component, Sent, add_values, arrays_of, receive_values
from gradserve.calls.accumulators.sharding.shard import Parts, Uncounted
from gradserve.calls.accumulators.sharding.staging import received_together, sent_together
from gradserve.calls.combinators import all_ended, at_target, replied, together
from gradserve.calls.exchange import Operation, Progress, Reply, Unary, Whole
from gradserve.calls.identity import AccumulatorKey
from gradserve.calls.parameters.compression import unpacked
from gradserve.calls.parameters.wire import PARAMETERS, add_saved
from gradserve.calls.tensors import call_with_arrays, placement_of, receive_results
from gradserve.results import Value
from gradserve.saved.parameters import SavedState
from gradserve_protocol.arrays import Array
from gradserve_protocol.digest import digest_of
from gradserve_protocol.errors import (
    AbortedError,
    GradserveError,
    LostError,
    NotFoundError,
    UnavailableError,
)
from gradserve_protocol.v1 import codecs_pb2, parameters_pb2, tensor_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2

NOT_STAGED_FIELD = "update"
"""The field of the error of a home that does not hold the update of a call."""
_BEHIND_FIELD = "decided"
"""The field of the error of a server that lacks rounds before those of a request."""
_MOST_TRIES = 100

CreateShard = Callable[[int, str, Mapping[str, Sent]], Operation[object]]
"""Creates the shard of a server, of an incarnation at the home, with values."""


class WholeState(NamedTuple):
    """The newest version of all servers, and the state of the optimizer.

    Attributes:
        version: Its message, without components and with the digest of all values.
        components: Its values, by component.
        state: The state; None if it was not asked for.
    """

    version: parameters_pb2.Version
    components: Mapping[str, Array]
    state: SavedState | None


class ParameterShards:
    """The calls on all servers of sharded parameters, but for those by which the home decides.

    Attributes:
        parts: The parts of the servers.
        others: The servers with parts, other than the home.
    """

    def __init__(
        self,
        components: Iterable[Component],
        parts: Parts,
        home: int,
        members: Mapping[int, str],
        uncounted: Uncounted,
        *,
        ref: Callable[[], parameters_pb2.ParametersRef],
        described: Callable[[], Operation[parameters_pb2.ParametersInfo]],
        at_home: Callable[[str, Message], Unary],
    ) -> None:
        """Takes what is known of the parameters.

        Args:
            components: Their components, again and again.
            parts: The parts of the servers.
            home: The index of their home.
            members: The servers that have a part, as requests name them.
            uncounted: The updates that were staged and do not count.
            ref: Returns their name at the home.
            described: Describes them, as the home does; raises the error that a caller gets if they are gone.
            at_home: Makes a call at the home, of a method with a request.
        """
        self.parts = parts
        self.others = [target for target in parts.servers if target != home]
        self._components = components
        self._home = home
        self._members = members
        self._uncounted = uncounted
        self._ref = ref
        self._at_home = at_home
        self._described_at_home = described

    def ref(self, target: int) -> parameters_pb2.ParametersRef:
        """Returns the name of the parameters on a server, whichever run of it that is."""
        ref = self._ref()
        return parameters_pb2.ParametersRef(
            container=ref.container, name=ref.name, incarnation=ref.incarnation, member=self._members[target]
        )

    def described(self, target: int) -> Operation[parameters_pb2.ParametersInfo | None]:
        """Describes the shard of a server; returns None if it has none."""
        try:
            found: parameters_pb2.ParametersInfo = yield from at_target(target, PARAMETERS.described(self.ref(target)))
        except NotFoundError:
            return None
        return found

    def num_bytes_elsewhere(self) -> Operation[int]:
        """Returns the memory that the parameters use on the servers that are not their home."""
        others = yield from all_ended(*[self.described(target) for target in self.others])
        return sum([each.num_bytes for each in others if each is not None])

    def delete(self, home_incarnation: str) -> Operation[None]:
        """Deletes the shards of an incarnation that its home has deleted, and earlier ones."""
        yield from all_ended(*[at_target(target, self._deleted(target, home_incarnation)) for target in self.others])

    def _deleted(self, target: int, home_incarnation: str) -> Operation[None]:
        ref = self.ref(target)
        ref.incarnation = ""
        request = messages_pb2.DeleteParametersRequest(parameters=ref, home_incarnation=home_incarnation)
        yield Unary(PARAMETERS.name, "DeleteParameters", request)

    # Updates

    def stage(
        self,
        target: int,
        staging: messages_pb2.StageUpdateRequest,
        values: Mapping[str, Sent],
        key: AccumulatorKey,
        progress: Progress | None = None,
    ) -> Operation[parameters_pb2.Measurement | None]:
        """Stages a server's part of an update; returns what it has measured for the home.

        Args:
            target: The index of the server.
            staging: The request, without the values, for the incarnation that it names.
            values: The part.
            key: The parameters, as `Uncounted` knows them.
            progress: Told how many bytes were moved.
        """
        sent = messages_pb2.StageUpdateRequest()
        sent.CopyFrom(staging)
        sent.parameters.CopyFrom(self.ref(target))
        sent.parameters.incarnation = staging.parameters.incarnation
        self._uncounted.address(sent, key, target)

        def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
            message = messages_pb2.StageUpdateRequest()
            message.CopyFrom(sent)
            add_values(message.update, values, tensors)
            return message

        call = call_with_arrays(
            PARAMETERS.name, "StageUpdate", arrays_of(values)[0], request, released=True, progress=progress
        )
        try:
            reply = yield from at_target(target, call)
        except NotFoundError as error:
            raise (yield from self._lost(target)) from error
        except GradserveError as error:
            self.parts.name_field(target, error)
            raise
        self._uncounted.answered(sent, key, target, asks=reply.message.has_old_updates)
        return reply.message.measured if reply.message.HasField("measured") else None

    def forget_uncounted(self, targets: Collection[int]) -> Operation[int | None]:
        """Ends the epoch, and tries to have servers forget what was staged in it and does not count.

        Returns:
            The next epoch; None if the home has not answered.
        """
        asked = messages_pb2.CountUpdatesRequest(parameters=self._ref())
        with suppress(GradserveError):
            answer: messages_pb2.CountUpdatesResponse = yield self._at_home("CountUpdates", asked)
            with suppress(GradserveError):
                yield from all_ended(*[at_target(target, self._forgotten(target, answer)) for target in targets])
            return answer.epoch
        return None

    def _forgotten(self, target: int, answer: messages_pb2.CountUpdatesResponse) -> Operation[None]:
        request = messages_pb2.ForgetUpdatesRequest(
            parameters=self.ref(target), epoch=answer.epoch, part_ids=answer.part_ids
        )
        with suppress(NotFoundError):
            yield Unary(PARAMETERS.name, "ForgetUpdates", request)

    # Versions

    def read(
        self,
        version: parameters_pb2.Version,
        progress: Progress | None = None,
        *,
        in_place: bool,
        codec: codecs_pb2.Codec = codecs_pb2.CODEC_UNSPECIFIED,
    ) -> Operation[dict[str, Value]]:
        """Returns the values of a version of which the home has told the step and the round."""
        read = partial(self._read_shard, version, in_place=in_place, codec=codec)
        received = yield from received_together(progress, [partial(read, each) for each in self.parts.servers])
        return self.parts.put_together(dict(zip(self.parts.servers, received, strict=True)), read_only=in_place)

    def tell(self, version: parameters_pb2.Version) -> Operation[None]:
        """Has the other servers make a version, without reading it."""

        def told(target: int) -> Operation[object]:
            read = partial(self._read_call_of, target, version.step, in_place=True, with_values=False)
            return self._following(target, version.step, _decided_in(version), read)

        yield from together(*map(told, self.others))

    def _read_shard(
        self,
        version: parameters_pb2.Version,
        target: int,
        progress: Progress | None,
        *,
        in_place: bool,
        codec: codecs_pb2.Codec,
    ) -> Operation[dict[str, Value]]:
        read = partial(self._read_call_of, target, version.step, in_place=in_place, progress=progress, codec=codec)
        reply = yield from self._following(target, version.step, _decided_in(version), read)
        values = yield from receive_values(reply, reply.message.version.components, progress, in_place=in_place)
        if codec:
            shapes = self.parts.shapes_at(target)
            values = yield from unpacked(self._components, values, shapes, read_only=in_place)
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
        with_values: bool = True,
        optimizer: parameters_pb2.Optimizer | None = None,
        codec: codecs_pb2.Codec = codecs_pb2.CODEC_UNSPECIFIED,
    ) -> Operation[Reply]:
        request = messages_pb2.ReadParametersRequest(
            parameters=self.ref(target),
            placement=placement_of(keep=False),
            with_state=with_state,
            without_values=not with_values,
            codec=codec,
        )
        if step is not None:
            request.step = step
        if optimizer is not None:
            request.state_optimizer.CopyFrom(optimizer)
        if target != self._home:
            request.decided.extend(decided)
        call = Unary(PARAMETERS.name, "ReadParameters", request, in_place=in_place)
        reply_bytes = self.parts.num_bytes(target) if with_values else 0
        return at_target(target, replied(Whole(call, progress=progress, reply_bytes=reply_bytes)))

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
                described = yield from self.described(target)
                if described is None:
                    raise (yield from self._lost(target)) from error
                if described.step >= step:
                    continue  # another client has brought it these rounds in the meantime
                earlier = yield from self._decided_since(described.step, step)
                if not earlier or (earlier[0].step != described.step + 1 and not any(each.loaded for each in earlier)):
                    ref = self._ref()
                    raise LostError(
                        f"server {target} of the cluster has parameters '{ref.container}/{ref.name}' at step "
                        f"{described.step}, and their home has no record of the round after it: load a saved version",
                        accumulator=ref.name,
                        num_gradients=0,
                    ) from error
                if decided and earlier[-1].step == decided[-1].step:
                    earlier[-1] = decided[-1]  # which also says which versions the home keeps now
                decided = earlier

    def _decided_since(self, since: int, up_to: int) -> Operation[list[parameters_pb2.DecidedRound]]:
        found: list[parameters_pb2.DecidedRound] = []
        while since < up_to:
            request = messages_pb2.ListRoundsRequest(parameters=self._ref(), since=since)
            reply: messages_pb2.ListRoundsResponse = yield self._at_home("ListRounds", request)
            found += [each.decided for each in reply.rounds if each.step <= up_to]
            if not reply.has_more or not reply.rounds:
                break
            since = reply.rounds[-1].step
        return found

    # States

    def read_state(self, *, with_state: bool) -> Operation[WholeState]:
        """Returns the newest version, and the state of the optimizer if that is wanted.

        Raises:
            UnavailableError: Rounds ended faster than all servers could be read.
        """
        for _ in range(_MOST_TRIES):
            at_home = yield from self._read_part(self._home, (), with_state=with_state)
            version = at_home.version
            others = yield from together(
                *[self._caught_up(target, version, with_state=with_state) for target in self.others]
            )
            found = {self._home: at_home, **dict(zip(self.others, others, strict=True))}
            if all(each.version.step == version.step for each in found.values()):
                return self._put_together(found, with_state=with_state)
        raise UnavailableError(
            f"rounds of parameters {self._ref().name!r} ended faster than the state of the optimizer could be read "
            "from all servers: try again"
        )

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
        self, target: int, version: parameters_pb2.Version, *, with_state: bool
    ) -> "Operation[_PartOfState]":
        found: list[_PartOfState] = []
        optimizer = version.state.optimizer if with_state else None

        def read(rounds: Sequence[parameters_pb2.DecidedRound]) -> Operation[Any]:
            found.append((yield from self._read_part(target, rounds, with_state=with_state, optimizer=optimizer)))

        yield from self._following(target, version.step, _decided_in(version), read)
        return found[-1]

    def _put_together(self, found: "Mapping[int, _PartOfState]", *, with_state: bool) -> WholeState:
        version = found[self._home].version
        values = self.parts.put_together({target: each.values for target, each in found.items()}, read_only=True)
        components = {each.name: cast("Array", values[each.name]) for each in self._components}
        whole = parameters_pb2.Version(
            step=version.step,
            num_updates=version.num_updates,
            total_weight=version.total_weight,
            worker_ids=version.worker_ids,
            digest=digest_of(components.values()),
        )
        if not with_state:
            return WholeState(whole, components, None)
        slots: dict[tuple[str, str], Any] = {}
        names = dict.fromkeys([slot.name for each in found.values() for slot in each.version.state.slots])
        for name in names:
            of_slot = {target: each.slots(name) for target, each in found.items()}
            joined = self.parts.put_together(of_slot, read_only=True)
            slots |= {(name, component): array for component, array in joined.items()}
        in_order = {
            (slot, each.name): slots[slot, each.name]
            for each in self._components
            for slot in names
            if (slot, each.name) in slots
        }
        steps = {name: count for each in found.values() for name, count in each.component_steps.items()}
        component_steps = {each.name: steps[each.name] for each in self._components}
        at_home = version.state
        return WholeState(whole, components, SavedState(in_order, component_steps, at_home.rounds, at_home.optimizer))

    def load(
        self,
        change: messages_pb2.ChangeParametersRequest,
        values: Mapping[str, Sent],
        state: SavedState | None,
        create_shard: CreateShard,
        progress: Progress | None = None,
        renew: Callable[[Any], Operation[None]] | None = None,
    ) -> Operation[Reply]:
        """Makes values the next version: gives all other servers their parts, and then has the home decide.

        Args:
            change: The request at the home, without values and with a request_id.
            values: The values of all components.
            state: The state of the optimizer; None for a new one.
            create_shard: Creates the shard of a server that has lost it.
            progress: Told how many bytes were moved.
            renew: Makes the request at the home one for the present run of the server.
        """
        parts = self.parts.of_gradient(values)
        states = parts_of_state(self.parts, state)

        def load_at(target: int, progress: Progress | None) -> Operation[Reply]:
            def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
                message = messages_pb2.ChangeParametersRequest()
                message.CopyFrom(change)
                message.release_handles = True
                message.parameters.CopyFrom(self._ref() if target == self._home else self.ref(target))
                add_saved(message, parts[target], states.get(target), tensors)
                return message

            arrays = [*arrays_of(parts[target])[0], *(states[target].slots.values() if target in states else ())]
            sent = call_with_arrays(
                PARAMETERS.name,
                "ChangeParameters",
                arrays,
                request,
                released=True,
                renew=renew if target == self._home else None,
                progress=progress,
            )
            return at_target(target, sent)

        def held_at(target: int, progress: Progress | None) -> Operation[Reply]:
            try:
                return (yield from load_at(target, progress))
            except NotFoundError:  # the server has lost its shard
                yield from create_shard(target, self._ref().incarnation, parts[target])
                return (yield from load_at(target, None))

        num_bytes = sum([array.nbytes for each in parts.values() for array in arrays_of(each)[0]])
        yield from sent_together(progress, num_bytes, [partial(held_at, target) for target in self.others])
        return (yield from load_at(self._home, None))

    def _lost(self, target: int) -> Operation[GradserveError]:
        """Returns the error for a server that has no shard: the parameters were deleted, or it has lost its shard."""
        try:
            yield from self._described_at_home()
        except GradserveError as error:
            return error
        ref = self._ref()
        return LostError(
            f"server {target} of the cluster was started again, and has lost its shard of parameters "
            f"'{ref.container}/{ref.name}', as durability 'none' says: load a saved version, or delete them and create "
            "them again",
            accumulator=ref.name,
            num_gradients=0,
        )


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


def _decided_in(version: parameters_pb2.Version) -> list[parameters_pb2.DecidedRound]:
    return [version.decided] if version.HasField("decided") else []
