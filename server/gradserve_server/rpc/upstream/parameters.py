"""ParameterService of an aggregator: shared parameters are upstream, private ones here."""

from __future__ import annotations

from typing import Any

from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.accumulators.incoming import components_named
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.parameters.packing import PackedVersions
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.budget import Purpose
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import wait_timeout
from gradserve_server.rpc.parameters.replies import encode_pulled, encode_read, encode_read_state, packed_version
from gradserve_server.rpc.parameters.requests import (
    UpdateRequest,
    decode_codec,
    decode_key,
    decode_parameters_spec,
    decode_state_optimizer,
    decode_step,
    decode_update,
    decode_version,
    names_in,
)
from gradserve_server.rpc.parameters.service import ParameterServicer
from gradserve_server.rpc.tensors.messages import TensorDeliverer
from gradserve_server.rpc.upstream.aggregated import KnownUpstream, listed
from gradserve_server.rpc.upstream.forwarding import Arrivals, Forwarding
from gradserve_server.rpc.upstream.messages import Answer, Pulled, Ref, copied, method_of, own_id
from gradserve_server.rpc.upstream.versions import AggregatedParameters, WithVersion, send_version
from gradserve_server.tensors.incoming import TensorOpener
from gradserve_server.upstream.latest import LatestAverage, LatestAverages

_NEVER = (1 << 63) - 1
"""A step that no parameters reach: reading its version ends with a diagnosis of the round."""
_AT_ONCE = 0.001


class AggregatingParameters:
    """Serves the parameters of the server upstream. The protos say what each method does.

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
            raise _not_sharded("spec.num_shards")
        if call.may_only_open is not None and request.values and not await self._exists(request.parameters):
            raise call.may_only_open
        sent = copied(request)
        if call.may_only_open is not None:
            sent.ClearField("creator")  # a caller that may not create must not get the turn
        response = await self._send_version(sent, call)
        await self._learn(response.info)
        return response

    async def GetParameters(self, request: messages_pb2.GetParametersRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.GetParameters(request, call)
        response = await self._link.call("GetParameters", copied(request))
        await self._learn(response.info)
        return response

    async def ListParameters(
        self, request: messages_pb2.ListParametersRequest, call: Call
    ) -> messages_pb2.ListParametersResponse:
        here = await self._local.ListParameters(request, call)
        return await listed(self._link, request, messages_pb2.ListParametersResponse, here)

    async def DeleteParameters(self, request: messages_pb2.DeleteParametersRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.DeleteParameters(request, call)
        response = await self._link.call("DeleteParameters", copied(request))
        self.known.forget(request.parameters)
        return response

    async def ChangeParameters(self, request: messages_pb2.ChangeParametersRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.ChangeParameters(request, call)
        sent = copied(request)
        own_id(sent, call.identity)
        response = await self._send_version(sent, call)
        await self._learn(response.info)
        return response

    async def ListRounds(self, request: messages_pb2.ListRoundsRequest, call: Call) -> Any:
        if self._is_local(request.parameters, call):
            return await self._local.ListRounds(request, call)
        return await self._link.call("ListRounds", copied(request))

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
        response = await self._link.call("ForkParameters", copied(request))
        await self._learn(response.info)
        return response

    # What clients of several servers ask each of them: this server is the only one of its clients

    async def StageUpdate(
        self, request: messages_pb2.StageUpdateRequest, call: Call
    ) -> messages_pb2.StageUpdateResponse:
        raise _not_sharded("parameters")

    async def CountUpdates(
        self, request: messages_pb2.CountUpdatesRequest, call: Call
    ) -> messages_pb2.CountUpdatesResponse:
        raise _not_sharded("parameters")

    async def ForgetUpdates(
        self, request: messages_pb2.ForgetUpdatesRequest, call: Call
    ) -> messages_pb2.ForgetUpdatesResponse:
        raise _not_sharded("parameters")

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
        waiting = self._registry.factory.waiting(call.identity)
        with waiting, self._deliverer.begin(request.placement, call) as outgoing:
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
        waiting = self._registry.factory.waiting(call.identity)
        with waiting, self._deliverer.begin(request.placement, call) as outgoing:
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
        if info.spec.num_shards:
            raise _not_sharded("parameters.name")
        key = decode_key(info.parameters)
        work = PIECE_BYTES * len(info.spec.components)
        spec = await self._compute.run(work, decode_parameters_spec, info.spec, key)
        forwarding = self._forwarding
        return AggregatedParameters(
            info.parameters,
            spec,
            forwarding.new_batches,
            LatestAverage(self._latest, forwarding.tasks),
            self._link,
            forwarding.counts,
            PackedVersions(self._compute, forwarding.memory.reserve(purpose=Purpose.COMPUTING)),
            is_shared=forwarding.rule.num_gradients > 1,
        )

    async def _learn(self, info: parameters_pb2.ParametersInfo) -> None:
        """Remembers parameters, with the rules that they have now."""
        (await self.known.remember(info)).follow(info)

    async def _send_version(self, request: WithVersion, call: Call) -> Any:
        """Makes a call upstream with the saved version of a request, if it has one."""
        work = PIECE_BYTES * (len(request.values) + len(request.state.slots))
        version = await self._compute.run(work, decode_version, request, call.payload, call.identity)
        if version is None:
            return await self._link.call(method_of(request), copied(request))
        with components_named("values", version.values):
            async with self._opener.open(version.tensors, release=request.release_handles, on_host=True):
                arrays = await self._compute.run(work, lambda: [each.read() for each in version.tensors])
                stored = any(each.is_stored for each in version.tensors)
                return await send_version(self._link, request, arrays, stored=stored)


async def _reason(parameters: AggregatedParameters, ref: parameters_pb2.ParametersRef) -> str:
    """Returns what the current round waits for, in the words of the server upstream."""
    try:
        await parameters.read(ref, _NEVER, _AT_ONCE, _AT_ONCE, with_values=False)
    except DeadlineExceededError as error:
        return error.message.partition(" s: ")[2] or error.message
    except ServiceError as error:
        return error.message
    return "nothing is known of the round"


def _not_sharded(field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "expected parameters on one server, got some that are sharded over several: this server is an aggregator, and "
        "does not forward their updates. Connect to the servers themselves",
        field=field,
    )
