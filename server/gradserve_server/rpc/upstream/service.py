"""AccumulatorService of an aggregator: shared accumulators are upstream, private ones here."""

from __future__ import annotations

import math
from typing import Any

from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.rounds import Applied, ClosingRule
from gradserve_server.accumulators.sharding.home import is_incarnation, is_of_earlier
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.rpc.accumulators.replies import encode_pulled, encode_read, encode_taken
from gradserve_server.rpc.accumulators.requests import (
    GradientRequest,
    decode_accumulator_spec,
    decode_gradient,
    decode_key,
)
from gradserve_server.rpc.accumulators.service import AccumulatorServicer
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import wait_timeout
from gradserve_server.rpc.tensors.messages import TensorDeliverer
from gradserve_server.rpc.upstream.aggregated import Aggregated, KnownUpstream, delete, listed
from gradserve_server.rpc.upstream.forwarding import Arrivals, Forwarding
from gradserve_server.rpc.upstream.messages import Answer, Pulled, Ref, copied, waiting_request
from gradserve_server.rpc.upstream.shards import UpstreamShards, shard_if_wanted
from gradserve_server.security.identity import ANONYMOUS
from gradserve_server.upstream.latest import LatestAverage, LatestAverages

_NEVER = (1 << 63) - 1
"""A step that no accumulator reaches: reading its average ends with a diagnosis of the round."""
_AT_ONCE = 0.001


class AggregatingServicer:
    """Serves the accumulators of the server upstream. The protos say what each method does.

    It keeps nothing that a restart could lose: a gradient is answered when the server upstream has answered it, and
    the ids of calls, and the runs of the server, are those that workers and that server see.
    """

    def __init__(
        self,
        forwarding: Forwarding,
        arrivals: Arrivals,
        latest: LatestAverages,
        local: AccumulatorServicer,
        registry: AccumulatorRegistry,
        deliverer: TensorDeliverer,
    ) -> None:
        self._forwarding = forwarding
        self._link = forwarding.link
        self._compute = forwarding.place.compute
        self._counts = forwarding.counts
        self._tasks = forwarding.tasks
        self._local = local
        self._registry = registry
        self._deliverer = deliverer
        self._arrivals = arrivals
        self._latest = latest
        self.known: KnownUpstream[Aggregated] = KnownUpstream(
            self._describe, self._check, self._make, forwarding.forward
        )
        """The accumulators upstream that are known here."""

    def close(self) -> None:
        """Ends the calls whose gradients wait for others: nothing of them has counted."""
        self.known.close(UnavailableError("the aggregator is shutting down", code="GS_SHUTTING_DOWN"))

    # By name

    async def CreateAccumulator(self, request: messages_pb2.CreateAccumulatorRequest, call: Call) -> Any:
        if request.lifetime.owner_client_id:
            return await self._local.CreateAccumulator(request, call)
        if call.may_only_open is not None and not (
            await self._exists(request.accumulator) or await self._belongs_to_another(request.accumulator)
        ):
            raise call.may_only_open
        work = PIECE_BYTES * len(request.spec.components)
        sent = await self._compute.run(work, self._creation, request)
        earlier = ""
        while True:
            response = await self._link.call("CreateAccumulator", sent)
            accumulator = await self.known.remember(response.info)
            try:
                if accumulator.shards is not None:
                    await accumulator.shards.create()
            except AbortedError as error:  # it was deleted since
                if not is_of_earlier(error) or accumulator.incarnation == earlier:
                    raise
                earlier = accumulator.incarnation
            else:
                return response

    async def GetAccumulator(self, request: messages_pb2.GetAccumulatorRequest, call: Call) -> Any:
        if self._is_local(request.accumulator, call):
            return await self._local.GetAccumulator(request, call)
        response = await self._link.call("GetAccumulator", copied(request))
        accumulator = await self.known.remember(response.info)
        if accumulator.shards is not None:
            response.info.num_bytes += await accumulator.shards.num_bytes_elsewhere()
        return response

    async def ListAccumulators(
        self, request: messages_pb2.ListAccumulatorsRequest, call: Call
    ) -> messages_pb2.ListAccumulatorsResponse:
        here = await self._local.ListAccumulators(request, call)
        return await listed(self._link, request, messages_pb2.ListAccumulatorsResponse, here)

    async def DeleteAccumulator(self, request: messages_pb2.DeleteAccumulatorRequest, call: Call) -> Any:
        if self._is_local(request.accumulator, call):
            return await self._local.DeleteAccumulator(request, call)
        response = await delete(self._link, request)
        self.known.forget(request.accumulator)
        return response

    async def _exists(self, ref: accumulator_pb2.AccumulatorRef) -> bool:
        try:
            await self._link.call("GetAccumulator", messages_pb2.GetAccumulatorRequest(accumulator=ref))
        except NotFoundError:
            return False
        return True

    async def _belongs_to_another(self, ref: accumulator_pb2.AccumulatorRef) -> bool:
        """Does what `AccumulatorRegistry.belongs_to_another` does, with the accumulators upstream."""
        segments = ref.name.split("/")
        for at in range(1, len(segments) - 1):
            name, incarnation = "/".join(segments[:at]), segments[at]
            if name and is_incarnation(incarnation):
                other = accumulator_pb2.AccumulatorRef(container=ref.container, name=name, incarnation=incarnation)
                if await self._exists(other):
                    return True
        return False

    async def GetNumAccumulated(self, request: messages_pb2.GetNumAccumulatedRequest, call: Call) -> Any:
        if self._is_local(request.accumulator, call):
            return await self._local.GetNumAccumulated(request, call)
        return await self._link.call("GetNumAccumulated", copied(request))

    async def SetGlobalStep(self, request: messages_pb2.SetGlobalStepRequest, call: Call) -> Any:
        if self._is_local(request.accumulator, call):
            return await self._local.SetGlobalStep(request, call)
        return await self._link.call("SetGlobalStep", copied(request))

    # Gradients

    async def ApplyGradient(
        self, request: messages_pb2.ApplyGradientRequest, call: Call
    ) -> messages_pb2.ApplyGradientResponse:
        if self._is_local(request.accumulator, call):
            return await self._local.ApplyGradient(request, call)
        accumulator = await self.known.find(request.accumulator)
        answer, is_repeated = await self._answered(accumulator, request, call, None)
        assert isinstance(answer, messages_pb2.ApplyGradientResponse), "the kinds of calls differ in their fingerprints"
        if is_repeated:
            answer = copied(answer)
            answer.duplicate = True
        return answer

    async def PushPull(self, request: messages_pb2.PushPullRequest, call: Call) -> WithContents:
        if self._is_local(request.accumulator, call):
            return await self._local.PushPull(request, call)
        closing = ClosingRule(request.num_required)
        accumulator = await self.known.find(request.accumulator)
        with self._registry.factory.waiting(call.identity), self._deliverer.begin(request.placement, call) as outgoing:
            timeout = wait_timeout(request, call)
            try:
                answer, is_repeated = await self._answered(accumulator, request, call, timeout)
            except TimeoutError:
                reason = await self._reason(request.accumulator)
                raise DeadlineExceededError(
                    f"accumulator {accumulator.name!r} did not get the {closing.num_required} gradients required "
                    f"within {timeout:g} s: {reason}",
                    code="GS_ROUND_INCOMPLETE",
                ) from None
            assert isinstance(answer, Pulled), "the kinds of calls differ in their fingerprints"
            return await encode_pulled(
                Applied(answer.outcome, None, answer.global_step, 0),
                answer.average,
                outgoing,
                duplicate=answer.duplicate or is_repeated,
                global_step=answer.global_step,
            )

    async def _answered(
        self, accumulator: Aggregated, request: GradientRequest, call: Call, timeout: float | None
    ) -> tuple[Answer, bool]:
        """Passes a gradient on; see `Arrivals.answered`."""
        spec = accumulator.spec
        if request.sum_of:
            spec = await self._compute.run(PIECE_BYTES * len(spec.components), lambda: accumulator.spec.of_sums)
        work = PIECE_BYTES * len(request.gradient)
        decoded = await self._compute.run(work, decode_gradient, request, call.payload, call.identity)
        return await self._arrivals.answered(accumulator, spec, request, decoded, call.identity, timeout)

    # Averages

    async def TakeGradient(self, request: messages_pb2.TakeGradientRequest, call: Call) -> WithContents:
        if self._is_local(request.accumulator, call):
            return await self._local.TakeGradient(request, call)
        ClosingRule(request.num_required)  # raises for one that no server would take
        if call.may_only_open is not None and not await self._belongs_to_another(request.accumulator):
            raise call.may_only_open
        with self._registry.factory.waiting(call.identity), self._deliverer.begin(request.placement, call) as outgoing:
            timeout = wait_timeout(request, call)
            accumulator = await self.known.find(request.accumulator)
            sent = waiting_request(request, call.identity, timeout)
            wait = math.inf if timeout is None else timeout
            response, average = await self._waited(accumulator, "TakeGradient", sent, wait)
            accumulator.latest.note(average)
            return await encode_taken(average, outgoing, duplicate=response.duplicate)

    async def ReadAverage(self, request: messages_pb2.ReadAverageRequest, call: Call) -> WithContents:
        if self._is_local(request.accumulator, call):
            return await self._local.ReadAverage(request, call)
        with self._registry.factory.waiting(call.identity), self._deliverer.begin(request.placement, call) as outgoing:
            average = await self._read(request, call)
            self._counts.reads += 1
            return await encode_read(average, outgoing)

    async def _read(self, request: messages_pb2.ReadAverageRequest, call: Call) -> Average:
        timeout = wait_timeout(request, call)
        accumulator = await self.known.find(request.accumulator)
        step = request.step if request.HasField("step") else None
        asked = messages_pb2.GetNumAccumulatedRequest(accumulator=request.accumulator)
        state = await self._link.call("GetNumAccumulated", asked)
        average = accumulator.latest.find(step, state.num_rounds, state.epoch)
        if average is not None:
            return average

        async def read() -> Average:
            self._counts.downloads += 1
            sent = waiting_request(request, call.identity, None)
            return (await self._waited(accumulator, "ReadAverage", sent, math.inf))[1]

        # Who asks for the newest one must not get what somebody else has asked for before its round had ended.
        key = (request.accumulator.server_incarnation, step, state.epoch, state.num_rounds if step is None else None)
        try:
            return await accumulator.latest.shared(key, read, timeout)
        except TimeoutError:
            sent = waiting_request(request, call.identity, _AT_ONCE)
            # Which says why it has not come, or has it by now.
            return (await self._waited(accumulator, "ReadAverage", sent, _AT_ONCE))[1]

    async def _waited(self, accumulator: Aggregated, method: str, request: Any, wait: float) -> tuple[Any, Average]:
        if accumulator.shards is not None:
            return await accumulator.shards.wait(method, request, wait)
        return await self._link.wait(method, request, wait)

    async def _reason(self, ref: accumulator_pb2.AccumulatorRef) -> str:
        """Returns what the current round waits for, in the words of the server upstream."""
        request = messages_pb2.ReadAverageRequest(accumulator=ref, step=_NEVER)
        try:
            await self._link.wait("ReadAverage", waiting_request(request, ANONYMOUS, _AT_ONCE), _AT_ONCE)
        except DeadlineExceededError as error:
            return error.message.partition(" s: ")[2] or error.message
        except ServiceError as error:
            return error.message
        return "nothing is known of the round"

    # What clients of several servers ask each of them: this server is the only one of its clients

    async def StageGradient(
        self, request: messages_pb2.StageGradientRequest, call: Call
    ) -> messages_pb2.StageGradientResponse:
        raise _no_shard(request.accumulator)

    async def EndEpoch(self, request: messages_pb2.EndEpochRequest, call: Call) -> messages_pb2.EndEpochResponse:
        raise _no_shard(request.accumulator)

    async def ForgetGradients(
        self, request: messages_pb2.ForgetGradientsRequest, call: Call
    ) -> messages_pb2.ForgetGradientsResponse:
        raise _no_shard(request.accumulator)

    async def ReduceGradients(self, request: messages_pb2.ReduceGradientsRequest, call: Call) -> WithContents:
        raise _no_shard(request.accumulator)

    # What is known of accumulators

    def _is_local(self, ref: accumulator_pb2.AccumulatorRef, call: Call) -> bool:
        return self._registry.has(decode_key(ref, call.identity))

    async def _describe(self, ref: Ref) -> accumulator_pb2.AccumulatorInfo:
        request = messages_pb2.GetAccumulatorRequest()
        request.accumulator.CopyFrom(ref)  # type: ignore[arg-type]
        info: accumulator_pb2.AccumulatorInfo = (await self._link.call("GetAccumulator", request)).info
        return info

    async def _check(self, ref: Ref) -> None:
        asked = messages_pb2.GetNumAccumulatedRequest()
        asked.accumulator.CopyFrom(ref)  # type: ignore[arg-type]
        await self._link.call("GetNumAccumulated", asked)

    async def _make(self, info: accumulator_pb2.AccumulatorInfo) -> Aggregated:
        spec, shards = await self._compute.run(PIECE_BYTES * len(info.spec.components), self._decoded, info)
        latest = LatestAverage(self._latest, self._tasks, info.epoch)
        return Aggregated(info.accumulator, spec, self._forwarding.new_batches, latest, shards)

    def _decoded(self, info: accumulator_pb2.AccumulatorInfo) -> tuple[AccumulatorSpec, UpstreamShards | None]:
        spec = decode_accumulator_spec(info.spec)
        # A single server upstream is an aggregator itself if what it has is sharded.
        is_divided = spec.num_shards and self._link.cluster.size > 1
        return spec, UpstreamShards(info, spec, self._link, self._compute) if is_divided else None

    def _creation(self, request: messages_pb2.CreateAccumulatorRequest) -> messages_pb2.CreateAccumulatorRequest:
        """Returns the request for the accumulator's home."""
        sent = copied(request)
        if self._link.cluster.size > 1:
            sent.ClearField("sharded")
            if not sent.spec.num_shards:
                shard_if_wanted(sent, request.sharded if request.HasField("sharded") else None, self._link.cluster)
        return sent


def _no_shard(ref: accumulator_pb2.AccumulatorRef) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"this server is an aggregator, to which gradients of accumulator {ref.name!r} come as a whole: apply them, "
        "or connect to the servers upstream themselves",
        field="accumulator.name",
    )
