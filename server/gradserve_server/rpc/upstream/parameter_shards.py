"""Parameters that are sharded over the servers upstream."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from gradserve.calls.accumulators.components import Component, Sent
from gradserve.calls.accumulators.sharding.shard import Parts, add_plan, plan_in, remove_plan
from gradserve.calls.accumulators.sharding.staging import EPOCH_FIELD
from gradserve.calls.combinators import at_target, together
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import CallId, RequestIds
from gradserve.calls.parameters.shard_creation import Creation, created, found_or_created
from gradserve.calls.parameters.shards import NOT_STAGED_FIELD, ParameterShards, WholeState
from gradserve.saved.parameters import SavedState
from gradserve_protocol.digest import digest_of
from gradserve_protocol.errors import (
    AbortedError,
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
)
from gradserve_protocol.placement import plan_of
from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_server import errors
from gradserve_server.accumulators.gradient import Array, Packed, Value
from gradserve_server.accumulators.spec import ComponentSpec
from gradserve_server.devices.compute import Compute
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.parameters.variables import OptimizerState
from gradserve_server.parameters.versions import Version
from gradserve_server.rpc.parameters.rules import decode_optimizer
from gradserve_server.rpc.parameters.updates import UpdateRequest
from gradserve_server.rpc.upstream.messages import copied, version_of
from gradserve_server.rpc.upstream.sharded import UpstreamSharded

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink

_FIELD = "update"
_MOST_REFUSALS = 20
"""The times that a home may ask for an update to be staged again, before something must be wrong."""


class UpstreamParameterShards(UpstreamSharded):
    """The shards of parameters on the servers upstream, and the calls on them: those of a client of all servers."""

    SERVICE = "ParameterService"

    def __init__(
        self, info: parameters_pb2.ParametersInfo, spec: ParametersSpec, link: UpstreamLink, compute: Compute
    ) -> None:
        """Takes what the parameters' home says of them, the connection, and what runs large work.

        Raises:
            InvalidArgumentError: They are sharded over other servers.
        """
        ref = info.parameters
        self._components = _components_of(spec.components)
        parts = Parts(self._components, plan_in(info.spec), _FIELD)
        super().__init__(info, ref, parts, link, compute, kind="parameters")
        self._key = ("parameters", ref.container, ref.name)
        self._ids = RequestIds(uuid.uuid4().hex)
        self._spec = spec
        self._creation = messages_pb2.CreateParametersRequest(
            parameters=parameters_pb2.ParametersRef(container=ref.container, name=ref.name),
            spec=info.spec,
            lifetime=self._lifetime,
        )

    async def num_bytes_elsewhere(self) -> int:
        """Returns the memory that the parameters use on the servers that are not their home.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """

        def operation() -> Operation[int]:
            shards = yield from self._shards(parameters_pb2.ParametersRef())
            return (yield from shards.num_bytes_elsewhere())

        return await self._link.run(operation())

    # Updates

    async def send(
        self, method: str, request: Any, values: Mapping[str, Value | Packed], wait: float
    ) -> tuple[Any, Version | None]:
        """Brings each server its part of an update, and then makes the call that adds it to the round.

        Args:
            method: The method of ParameterService.
            request: The request, with a request_id and without the update.
            values: The update, which nobody changes until this returns, and of which nothing is packed.
            wait: Seconds that the home may wait for others; math.inf for no limit.

        Returns:
            The response, and its version if it has one: with its values, unless the request wants none.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        pulls = isinstance(request, messages_pb2.PushPullParametersRequest)
        with_values = pulls and not request.without_values
        if pulls:
            request.without_values = True
        arrays = cast("Mapping[str, Array]", values)

        def operation() -> Operation[tuple[Any, Mapping[str, Any]]]:
            shards = yield from self._shards(request.parameters)
            message = yield from self._counted(shards, method, request, arrays, wait)
            return message, (yield from shards.read(message.version, in_place=True)) if with_values else {}

        message, received = await self._link.run(operation())
        return message, (await self._version(message.version, received)) if pulls else None

    def _counted(
        self,
        shards: ParameterShards,
        method: str,
        request: UpdateRequest,
        values: Mapping[str, Array],
        wait: float,
    ) -> Operation[Any]:
        """Stages an update, and has the home count it; returns the response of that."""
        parts = self._parts.of_gradient(cast("Mapping[str, Sent]", values))
        is_wide = bool(request.sum_of) or any(
            self._spec.by_name[name].dtype != value.dtype for name, value in values.items()
        )
        call = CallId(request.request_id.client_id, request.request_id.sequence)
        num_refusals, is_full = 0, False
        while True:
            staging = messages_pb2.StageUpdateRequest(
                local_step=request.local_step, release_handles=True, epoch=self._epoch, is_wide=is_wide
            )
            staging.parameters.incarnation = self._incarnation
            staging.request_id.client_id, staging.request_id.sequence = call
            try:
                measured = yield from together(
                    *[shards.stage(target, staging, parts[target], self._key) for target in self._parts.servers]
                )
            except ResourceExhaustedError:
                if is_full:
                    raise
                is_full = True  # perhaps of updates that do not count
                yield from self._forget_uncounted(shards, self._parts.servers)
                continue
            request.epoch = staging.epoch
            del request.measured[:]
            request.measured.extend([each for each in measured if each is not None])
            try:
                message: Any = (yield from self._asked(method, request, wait)).message
            except AbortedError as error:
                num_refusals += 1
                if num_refusals == _MOST_REFUSALS or error.field not in (EPOCH_FIELD, NOT_STAGED_FIELD):
                    if error.field == "sum_of":
                        self._uncounted.withdraw(self._key, self._parts.servers, call)
                    raise
                if error.field == EPOCH_FIELD:
                    self._epoch = (yield from self._described(request.parameters)).epoch
            except InvalidArgumentError:
                self._uncounted.withdraw(self._key, self._parts.servers, call)
                raise
            else:
                if message.outcome != accumulator_pb2.APPLY_OUTCOME_ACCEPTED:
                    self._uncounted.withdraw(self._key, self._parts.servers, call)
                asking = self._uncounted.take_asking(self._key)
                if asking:
                    yield from self._forget_uncounted(shards, asking)
                return message

    def _forget_uncounted(self, shards: ParameterShards, targets: Collection[int]) -> Operation[None]:
        epoch = yield from shards.forget_uncounted(targets)
        if epoch is not None:
            self._epoch = max(self._epoch, epoch)

    # Versions

    async def read(self, request: messages_pb2.ReadParametersRequest, wait: float) -> Version:
        """Reads a version; without values, only its step, and not the digest.

        Args:
            request: The request, without a request_id.
            wait: Seconds that the home may wait for it; math.inf for no limit.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        with_values = not request.without_values
        request.without_values = True

        def operation() -> Operation[tuple[Any, Mapping[str, Any]]]:
            shards = yield from self._shards(request.parameters)
            message: Any = (yield from self._asked("ReadParameters", request, wait)).message
            return message, (yield from shards.read(message.version, in_place=True)) if with_values else {}

        if not with_values:
            message, _ = await self._link.run(operation())
            return await self._version(message.version, {})
        # Its number keeps the version at the home until all servers have sent their pieces.
        with self._ids.open_calls.opened(self._key, self._ids.new_call, may_come_again=False) as call:
            self._ids.write(request.request_id, call, self._key)
            message, received = await self._link.run(operation())
        return await self._version(message.version, received)

    async def read_state(self, ref: parameters_pb2.ParametersRef) -> tuple[Version, OptimizerState]:
        """Reads the newest version with the state of its optimizer.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        whole = await self._whole_state(ref)
        assert whole.state is not None, "it is asked for"
        slots: dict[str, dict[str, Array]] = {}
        for (slot, component), array in whole.state.slots.items():
            slots.setdefault(slot, {})[component] = array
        optimizer = decode_optimizer(whole.state.optimizer)
        state = OptimizerState(slots, dict(whole.state.component_steps), whole.state.rounds, optimizer)
        return version_of(whole.version, dict(whole.components)), state

    async def _whole_state(self, ref: parameters_pb2.ParametersRef) -> WholeState:
        def operation() -> Operation[WholeState]:
            shards = yield from self._shards(ref)
            return (yield from shards.read_state(with_state=True))

        return await self._link.run(operation())

    async def load(
        self,
        request: messages_pb2.ChangeParametersRequest,
        values: Mapping[str, Array],
        state: SavedState | None,
    ) -> messages_pb2.ChangeParametersResponse:
        """Makes a saved version the next one.

        Args:
            request: The request of the caller, whose tensors are these.
            values: The values by component.
            state: The state of the optimizer; None for a new one.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        change = copied(request)
        del change.values[:]
        change.ClearField("state")
        if not change.HasField("request_id"):
            self._ids.write(change.request_id, self._ids.new_call(), self._key)

        def operation() -> Operation[messages_pb2.ChangeParametersResponse]:
            shards = yield from self._shards(change.parameters)
            reply = yield from shards.load(change, cast("Mapping[str, Sent]", values), state, self._create_shard)
            response: messages_pb2.ChangeParametersResponse = reply.message
            asked = messages_pb2.ReadParametersRequest(
                parameters=change.parameters, step=response.info.step, without_values=True
            )
            with suppress(OutOfRangeError):  # later rounds have ended, and others bring them to the servers
                found = yield from self._asked("ReadParameters", asked, 0.0)
                yield from shards.tell(found.message.version)
            return response

        return await self._link.run(operation())

    async def fork(self, request: messages_pb2.ForkParametersRequest) -> messages_pb2.CreateParametersResponse:
        """Creates sharded parameters with the values of a version of these, which are read and sent.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        ref, state = request.parameters, None
        if request.HasField("step"):
            asked = messages_pb2.ReadParametersRequest(parameters=ref, step=request.step)
            version = await self.read(asked, 0.0)
            values, step = cast("Mapping[str, Array]", version.values), version.step
        else:
            whole = await self._whole_state(ref)
            values, state, step = whole.components, whole.state, whole.version.step
        info = await self._link.run(self._described_at(ref))
        creation = messages_pb2.CreateParametersRequest(
            parameters=request.fork, spec=info.spec, lifetime=request.lifetime
        )
        remove_plan(creation.spec)
        return await create_sharded(self._link, creation, self._spec, values, state, step)

    # The parameters on the servers

    def _shards(self, ref: parameters_pb2.ParametersRef) -> Operation[ParameterShards]:
        """Makes a name that of these very parameters at their home; returns their shards, for calls that name them so.

        So the home refuses calls for another run of it, also those that follow when something is lost.
        """
        ref.container, ref.name, ref.incarnation = self._key[1], self._key[2], self._incarnation
        ref.member = yield from self._cluster.member(self._home)
        members = yield from self._cluster.members(self._parts.servers)
        return ParameterShards(
            self._components,
            self._parts,
            self._home,
            members,
            self._uncounted,
            ref=lambda: ref,
            described=lambda: self._described(ref),
            at_home=self._call,
        )

    def _described(self, ref: parameters_pb2.ParametersRef) -> Operation[parameters_pb2.ParametersInfo]:
        reply: Any = yield self._call("GetParameters", messages_pb2.GetParametersRequest(parameters=ref))
        info: parameters_pb2.ParametersInfo = reply.info
        return info

    def _described_at(self, ref: parameters_pb2.ParametersRef) -> Operation[parameters_pb2.ParametersInfo]:
        yield from self._shards(ref)
        return (yield from self._described(ref))

    def _use(self, target: int) -> Operation[object]:
        shards = yield from self._shards(parameters_pb2.ParametersRef())
        return (yield from shards.described(target))

    def _create_shard(self, target: int, incarnation: str, values: Mapping[str, Sent]) -> Operation[object]:
        request = copied(self._creation)
        request.home_incarnation = incarnation
        request.parameters.member = yield from self._cluster.member(target)
        return (yield from at_target(target, created(request, values, None, 0, target, None)))

    async def _version(self, message: parameters_pb2.Version, received: Mapping[str, Any]) -> Version:
        """Returns a version with the values of all servers, in the order of components, and their digest."""
        message.ClearField("decided")
        message.ClearField("digest")  # of the home's pieces
        if not received:
            return version_of(message, {})
        values: dict[str, Array] = {each.name: received[each.name] for each in self._components}
        num_bytes = sum([each.nbytes for each in values.values()])
        message.digest = await self._compute.run(num_bytes, digest_of, values.values())
        return version_of(message, values)


async def create_sharded(
    link: UpstreamLink,
    request: messages_pb2.CreateParametersRequest,
    spec: ParametersSpec,
    values: Mapping[str, Array] | None,
    state: SavedState | None,
    step: int,
) -> messages_pb2.CreateParametersResponse:
    """Finds parameters that are sharded over the servers upstream, or creates them there.

    Args:
        link: The servers upstream.
        request: The request for whole parameters, of which only the creator may have values.
        spec: Its spec.
        values: The values by component; None if the request has none.
        state: The state of the optimizer; None for a new one.
        step: The step of the values.

    Raises:
        NotFoundError: There are none, and it has no values; if it has a creator, that has the turn.
        ServiceError: See `UpstreamLink.call`.
    """
    home = link.cluster.home_of(request.parameters.container, request.parameters.name)
    components = _components_of(spec.components)
    plan = plan_of(components, home, link.cluster.size)
    parts = Parts(components, plan, _FIELD)
    at_home = copied(request)
    at_home.ClearField("sharded")
    at_home.ClearField("state")
    at_home.ClearField("step")
    at_home.ClearField("release_handles")
    del at_home.values[:]
    add_plan(at_home.spec, plan, link.cluster.size)
    if values is not None and not at_home.creator:
        at_home.creator = uuid.uuid4().hex

    def operation() -> Operation[messages_pb2.CreateParametersResponse]:
        at_home.parameters.member = yield from link.cluster.member(home)
        members = yield from link.cluster.members(parts.servers)
        sent = cast("Mapping[str, Sent] | None", values)
        return (yield from found_or_created(Creation(at_home, parts, members, sent, state, step), home))

    response = await link.run(operation())
    if not response.HasField("info"):
        error = errors.NotFoundError(
            f"there are no parameters {request.parameters.name!r}, and no values to create them with",
            field="parameters.name",
        )
        error.is_awaited = True  # the caller sends values next
        raise error
    return response


def show_as_whole(info: parameters_pb2.ParametersInfo) -> None:
    """Makes the description of sharded parameters by their home one for workers, to whom they are on this server."""
    if not info.spec.num_shards:
        return
    remove_plan(info.spec)
    info.ClearField("digest")  # of the home's pieces


def _components_of(components: Sequence[ComponentSpec]) -> list[Component]:
    return [Component(each.name, each.dtype, each.shape.dims, is_sparse=False) for each in components]
