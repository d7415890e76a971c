"""ParameterService of an aggregator: shared parameters are upstream, private ones here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from gradserve.saved.parameters import SavedState
from gradserve_protocol.arrays import DoesNotFitError
from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.incoming import components_named
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.parameters.versions import PackedVersions, Version
from gradserve_server.resources.budget import Purpose
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import wait_timeout
from gradserve_server.rpc.parameters.replies import encode_pulled, encode_read, encode_read_state, packed_version
from gradserve_server.rpc.parameters.requests import (
    IncomingVersion,
    decode_codec,
    decode_key,
    decode_parameters_spec,
    decode_state_optimizer,
    decode_step,
    decode_version,
)
from gradserve_server.rpc.parameters.service import ParameterServicer
from gradserve_server.rpc.parameters.updates import UpdateRequest, decode_update, names_in
from gradserve_server.rpc.tensors.messages import TensorDeliverer
from gradserve_server.rpc.upstream.aggregated import KnownUpstream, delete, listed
from gradserve_server.rpc.upstream.forwarding import Arrivals, Forwarding
from gradserve_server.rpc.upstream.messages import Answer, Pulled, Ref, copied, method_of, own_id
from gradserve_server.rpc.upstream.parameter_shards import UpstreamParameterShards, create_sharded, show_as_whole
from gradserve_server.rpc.upstream.versions import AggregatedParameters, WithVersion, send_version
from gradserve_server.tensors.incoming import TensorOpener
from gradserve_server.upstream.latest import LatestAverage, LatestAverages

_NEVER = (1 << 63) - 1
"""A step that no parameters reach: reading its version ends with a diagnosis of the round."""
_AT_ONCE = 0.001

WithInfo = TypeVar(
    "WithInfo",
    messages_pb2.CreateParametersResponse,
    messages_pb2.GetParametersResponse,
    messages_pb2.ChangeParametersResponse,
    messages_pb2.ForkParametersResponse,
)


class AggregatingParameters:
    """Serves the parameters of the servers upstream. The protos say what each method does.

    Like `AggregatingServicer`, it keeps nothing that a restart could lose.
    """

    def __init__(
        self,
        forwarding: Forwarding,
        arrivals: Arrivals,
        latest: LatestAverages,
        local: ParameterServicer,
        registry: ParametersRegistry,
        opener: TensorOpener,
        deliverer: TensorDeliverer,
    ) -> None:
        self._forwarding = forwarding
        self._arrivals = arrivals
        self._latest = latest
        self._link = forwarding.link
        self._compute = forwarding.place.compute
        self._local = local
        self._registry = registry
        self._opener = opener
        self._deliverer = deliverer
        self.known: KnownUpstream[AggregatedParameters] = KnownUpstream(
            self._describe, self._check, self._make, forwarding.forward
        )
        """The parameters upstream that are known here."""

    def close(self) -> None:
        """Ends the calls whose updates wait for others: nothing of them has counted."""
        self.known.close(UnavailableError("the aggregator is shutting down", code="GS_SHUTTING_DOWN"))

    # By name

    async def CreateParameters(self, request: messages_pb2.CreateParametersRequest, call: Call) -> Any:
        if request.lifetime.owner_client_id:
            return await self._local.CreateParameters(request, call)
        if request.spec.num_shards:
            raise _not_in_parts("spec.num_shards")
        if call.may_only_open is not None and request.values and not await self._exists(request.parameters):
            raise call.may_only_open
        sent = copied(request)
        if call.may_only_open is not None:
            sent.ClearField("creator")  # a caller that may not create must not get the turn
        if sent.sharded and self._link.cluster.size > 1:
            response: Any = await self._create_sharded(sent, call)
        else:
            response = await self._send_version(sent, call)
        return await self._learned(response)

    async def GetParameters(self, request: messages_pb2.GetParametersRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.GetParameters(request, call)
        return await self._learned(await self._link.call("GetParameters", copied(request)))

    async def ListParameters(
        self, request: messages_pb2.ListParametersRequest, call: Call
    ) -> messages_pb2.ListParametersResponse:
        here = await self._local.ListParameters(request, call)
        response = await listed(self._link, request, messages_pb2.ListParametersResponse, here)
        for each in response.parameters:
            show_as_whole(each)
        return response

    async def DeleteParameters(self, request: messages_pb2.DeleteParametersRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.DeleteParameters(request, call)
        response = await delete(self._link, request)
        self.known.forget(request.parameters)
        return response

    async def ChangeParameters(self, request: messages_pb2.ChangeParametersRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.ChangeParameters(request, call)
        sent = copied(request)
        own_id(sent, call.identity)
        return await self._learned(await self._send_version(sent, call))

    async def ListRounds(self, request: messages_pb2.ListRoundsRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.ListRounds(request, call)
        response = await self._link.call("ListRounds", copied(request))
        for each in response.rounds:
            each.ClearField("decided")  # which is for servers
        return response

    async def ReportEvaluation(self, request: messages_pb2.ReportEvaluationRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.ReportEvaluation(request, call)
        sent = copied(request)
        own_id(sent, call.identity)
        return await self._link.call("ReportEvaluation", sent)

    async def ListEvaluations(self, request: messages_pb2.ListEvaluationsRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.ListEvaluations(request, call)
        return await self._link.call("ListEvaluations", copied(request))

    async def ForkParameters(self, request: messages_pb2.ForkParametersRequest, call: Call) -> Any:
        is_private = bool(request.lifetime.owner_client_id)
        if is_private is not self._is_local(request.parameters, call):
            raise InvalidArgumentError(
                "expected a fork with the lifetime of its source: this server is an aggregator, where private "
                "parameters are, and shared ones are on the server upstream",
                field="lifetime.owner_client_id",
            )
        if is_private:
            return await self._local.ForkParameters(request, call)
        parameters = await self.known.find(request.parameters)
        if parameters.servers is None:
            return await self._learned(await self._link.call("ForkParameters", copied(request)))
        created = await self._learned(await parameters.servers.fork(request))
        return messages_pb2.ForkParametersResponse(info=created.info)

    # What clients of several servers ask each of them: this server is the only one of its clients

    async def StageUpdate(
        self, request: messages_pb2.StageUpdateRequest, call: Call
    ) -> messages_pb2.StageUpdateResponse:
        raise _not_in_parts("parameters")

    async def CountUpdates(
        self, request: messages_pb2.CountUpdatesRequest, call: Call
    ) -> messages_pb2.CountUpdatesResponse:
        raise _not_in_parts("parameters")

    async def ForgetUpdates(
        self, request: messages_pb2.ForgetUpdatesRequest, call: Call
    ) -> messages_pb2.ForgetUpdatesResponse:
        raise _not_in_parts("parameters")

    # Versions

    async def ReadParameters(self, request: messages_pb2.ReadParametersRequest, call: Call) -> WithContents:
        if self._is_local(request.parameters, call):
            return await self._local.ReadParameters(request, call)
        step, codec = decode_step(request), decode_codec(request)
        if decode_state_optimizer(request) is not None:
            raise InvalidArgumentError(
                f"expected none at the home of parameters {request.parameters.name!r}, which aggregators stand for",
                field="state_optimizer",
            )
        with self._registry.factory.waiting(call.identity), self._deliverer.begin(request.placement, call) as outgoing:
            parameters = await self.known.find(request.parameters)
            with_values = not request.without_values
            self._forwarding.counts.reads += 1
            if request.with_state:
                version, state = await parameters.read_state(request.parameters, with_values=with_values)
                return await encode_read_state(version, state, outgoing, with_values=with_values)
            version = await self._read(parameters, request, step, wait_timeout(request, call))
            packed = await packed_version(parameters.packed, version, codec, with_values=with_values)
            return await encode_read(version, outgoing, with_values=with_values, packed=packed)

    async def _read(
        self,
        parameters: AggregatedParameters,
        request: messages_pb2.ReadParametersRequest,
        step: int | None,
        timeout: float | None,
    ) -> Version:
        ref, with_values = request.parameters, not request.without_values
        while True:
            newest = await parameters.read(ref, None, None, 0.0, with_values=False)
            if step in (None, newest.step):
                if not with_values:
                    return newest
                try:
                    return await parameters.version(ref, newest)
                except OutOfRangeError:
                    if step is not None:
                        raise
                    continue  # newer ones have come since
            try:
                assert step is not None, "the newest one is asked for without a step"
                return await parameters.wait_for(ref, step, timeout, with_values=with_values)
            except TimeoutError:
                # This call says why it has not come, or has it by now.
                return await parameters.read(ref, step, _AT_ONCE, _AT_ONCE, with_values=with_values)

    # Updates

    async def Push(self, request: messages_pb2.PushRequest, call: Call) -> messages_pb2.PushResponse:
        if self._is_local(request.parameters, call):
            return await self._local.Push(request, call)
        parameters = await self.known.find(request.parameters)
        answer, is_repeated = await self._answered(parameters, request, call, None)
        assert isinstance(answer, messages_pb2.PushResponse), "the kinds of calls differ in their fingerprints"
        if is_repeated:
            answer = copied(answer)
            answer.duplicate = True
        return answer

    async def PushPullParameters(self, request: messages_pb2.PushPullParametersRequest, call: Call) -> WithContents:
        if self._is_local(request.parameters, call):
            return await self._local.PushPullParameters(request, call)
        codec, with_values = decode_codec(request), not request.without_values
        with self._registry.factory.waiting(call.identity), self._deliverer.begin(request.placement, call) as outgoing:
            parameters = await self.known.find(request.parameters)
            timeout = wait_timeout(request, call)
            try:
                answer, is_repeated = await self._answered(parameters, request, call, timeout)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"parameters {parameters.name!r} did not get the updates required within {timeout:g} s: "
                    f"{await _reason(parameters, request.parameters)}",
                    code="GS_ROUND_INCOMPLETE",
                ) from None
            assert isinstance(answer, Pulled), "the kinds of calls differ in their fingerprints"
            assert isinstance(answer.average, Version), "there is a version from the beginning"
            return await encode_pulled(
                answer.outcome,
                answer.average,
                outgoing,
                staleness=answer.staleness,
                weight=answer.weight,
                duplicate=answer.duplicate or is_repeated,
                with_values=with_values,
                packed=await packed_version(parameters.packed, answer.average, codec, with_values=with_values),
            )

    async def _answered(
        self, parameters: AggregatedParameters, request: UpdateRequest, call: Call, timeout: float | None
    ) -> tuple[Answer, bool]:
        """Passes an update on; see `Arrivals.answered`."""
        work = PIECE_BYTES * len(request.update)
        decoded = await self._compute.run(work, decode_update, request, call.payload, call.identity)
        properties = parameters.properties

        def spec_of() -> AccumulatorSpec:
            return properties.of_update(names_in(decoded[2], properties.components), is_sum=bool(request.sum_of))

        spec = await self._compute.run(work, spec_of)
        return await self._arrivals.answered(parameters, spec, request, decoded, call.identity, timeout)

    # What is known of parameters

    def _is_local(self, ref: parameters_pb2.ParametersRef, call: Call) -> bool:
        return self._registry.has(decode_key(ref, call.identity))

    async def _exists(self, ref: parameters_pb2.ParametersRef) -> bool:
        try:
            await self._describe(ref)
        except NotFoundError:
            return False
        return True

    async def _describe(self, ref: Ref) -> parameters_pb2.ParametersInfo:
        request = messages_pb2.GetParametersRequest()
        request.parameters.CopyFrom(ref)  # type: ignore[arg-type]
        info: parameters_pb2.ParametersInfo = (await self._link.call("GetParameters", request)).info
        return info

    async def _check(self, ref: Ref) -> None:
        asked = messages_pb2.ReadParametersRequest(without_values=True)
        asked.parameters.CopyFrom(ref)  # type: ignore[arg-type]
        await self._link.call("ReadParameters", asked)

    async def _make(self, info: parameters_pb2.ParametersInfo) -> AggregatedParameters:
        work = PIECE_BYTES * len(info.spec.components)
        spec, servers = await self._compute.run(work, self._decoded, info)
        forwarding = self._forwarding
        return AggregatedParameters(
            info.parameters,
            spec,
            forwarding.new_batches,
            LatestAverage(self._latest, forwarding.tasks),
            self._link,
            forwarding.counts,
            PackedVersions(self._compute, forwarding.memory.reserve(purpose=Purpose.COMPUTING)),
            servers,
            is_shared=forwarding.rule.num_gradients > 1,
        )

    def _decoded(self, info: parameters_pb2.ParametersInfo) -> tuple[ParametersSpec, UpstreamParameterShards | None]:
        whole = copied(info)
        show_as_whole(whole)
        spec = decode_parameters_spec(whole.spec, decode_key(info.parameters))
        servers = UpstreamParameterShards(info, spec, self._link, self._compute) if info.spec.num_shards else None
        return spec, servers

    async def _learned(self, response: WithInfo) -> WithInfo:
        """Remembers the parameters in a response, with the rules that they have now; returns what workers see of it."""
        parameters = await self.known.remember(response.info)
        parameters.follow(response.info)
        if parameters.servers is not None:
            response.info.num_bytes += await parameters.servers.num_bytes_elsewhere()
            show_as_whole(response.info)
        return response

    async def _send_version(self, request: WithVersion, call: Call) -> Any:
        """Makes a call upstream with the saved version of a request, if it has one."""
        work = PIECE_BYTES * (len(request.values) + len(request.state.slots))
        version = await self._compute.run(work, decode_version, request, call.payload, call.identity)
        if version is None:
            return await self._link.call(method_of(request), copied(request))
        if isinstance(request, messages_pb2.ChangeParametersRequest):
            parameters = await self.known.find(request.parameters)
            if parameters.servers is not None:
                async with self._loaded(version, request, parameters.properties) as (values, state):
                    return await parameters.servers.load(request, values, state)
        with components_named("values", version.values):
            async with self._opener.open(version.tensors, release=request.release_handles, on_host=True):
                arrays = await self._compute.run(work, lambda: [each.read() for each in version.tensors])
                stored = any(each.is_stored for each in version.tensors)
                return await send_version(self._link, request, arrays, stored=stored)

    async def _create_sharded(self, request: messages_pb2.CreateParametersRequest, call: Call) -> Any:
        """Finds parameters that are sharded over the servers upstream, or creates them if the request has values."""
        work = PIECE_BYTES * (len(request.spec.components) + len(request.values) + len(request.state.slots))
        spec = await self._compute.run(work, decode_parameters_spec, request.spec, decode_key(request.parameters))
        version = await self._compute.run(work, decode_version, request, call.payload, call.identity)
        if version is None:
            return await create_sharded(self._link, request, spec, None, None, 0)
        async with self._loaded(version, request, spec) as (values, state):
            return await create_sharded(self._link, request, spec, values, state, request.step)

    @asynccontextmanager
    async def _loaded(
        self, version: IncomingVersion, request: WithVersion, spec: ParametersSpec
    ) -> AsyncIterator[tuple[Mapping[str, Array], SavedState | None]]:
        """Gives a block the values of a saved version, in the dtypes of components, and the state of its optimizer."""

        def read() -> tuple[Mapping[str, Array], SavedState | None]:
            loaded = version.loaded(spec.components)
            values = {each.name: self._converted(loaded.values[each.name], each) for each in spec.components}
            if loaded.state is None:
                return values, None
            slots = {(slot, name): each for slot, arrays in loaded.state.slots.items() for name, each in arrays.items()}
            return values, SavedState(slots, loaded.state.component_steps, loaded.state.rounds, request.state.optimizer)

        with components_named("values", version.values):
            async with self._opener.open(version.tensors, release=request.release_handles, on_host=True):
                yield await self._compute.run(max(spec.work, PIECE_BYTES * len(version.tensors)), read)

    def _converted(self, value: Array, component: ComponentSpec) -> Array:
        if value.dtype == component.dtype:
            return value
        try:
            return self._forwarding.place.converted(value, component.dtype)
        except DoesNotFitError as error:
            raise InvalidArgumentError(
                f"expected values of {component.dtype} for component {component.name!r}, got {error}", field="values"
            ) from None


async def _reason(parameters: AggregatedParameters, ref: parameters_pb2.ParametersRef) -> str:
    """Returns what the current round waits for, in the words of the server upstream."""
    try:
        await parameters.read(ref, _NEVER, _AT_ONCE, _AT_ONCE, with_values=False)
    except DeadlineExceededError as error:
        return error.message.partition(" s: ")[2] or error.message
    except ServiceError as error:
        return error.message
    return "nothing is known of the round"


def _not_in_parts(field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "expected parameters and updates as a whole, got parts of some that are sharded: this server is an aggregator, "
        "which shards them over the servers upstream itself (CreateParametersRequest.sharded)",
        field=field,
    )
