"""AccumulatorService: decode, call the domain, encode."""

from contextlib import AbstractContextManager
from typing import TypeVar

from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Contribution, OpenGradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import GradientReceiver, IncomingGradient, check_may_add
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.sharding.home import check_is_of, of_staged
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.errors import AbortedError, InvalidArgumentError
from gradserve_server.resources.cluster import Member, check_member
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.accumulators.gradients import weight_of
from gradserve_server.rpc.accumulators.replies import (
    ServerId,
    encode_applied,
    encode_pulled,
    encode_read,
    encode_reduced,
    encode_taken,
    info_pieces,
    num_parts,
)
from gradserve_server.rpc.accumulators.requests import (
    GradientRequest,
    counts_one_per_worker,
    decode_accumulator_spec,
    decode_counted,
    decode_decided,
    decode_gradient,
    decode_key,
    decode_read_id,
    decode_staged,
    decode_take_id,
    epoch_of,
)
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import decode_lifetime, page_of, wait_timeout
from gradserve_server.rpc.boundary.messages import Serialized, assembled
from gradserve_server.rpc.tensors.messages import TensorDeliverer

_WithInfo = TypeVar("_WithInfo", messages_pb2.CreateAccumulatorResponse, messages_pb2.GetAccumulatorResponse)


class AccumulatorServicer:
    """Serves the accumulators of a registry. The protos say what each method does."""

    def __init__(
        self,
        registry: AccumulatorRegistry,
        receiver: GradientReceiver,
        deliverer: TensorDeliverer,
        compute: Compute,
        incarnation: str,
        member: Member | None,
    ) -> None:
        """Takes, among others, the id of this run of the server, and its place in a cluster, if it is in one."""
        self._incarnation = incarnation
        self._member = member
        self._id = ServerId(incarnation, "" if member is None else member.text)
        self._registry = registry
        self._receiver = receiver
        self._compute = compute
        self._deliverer = deliverer

    async def CreateAccumulator(
        self, request: messages_pb2.CreateAccumulatorRequest, call: Call
    ) -> messages_pb2.CreateAccumulatorResponse | Serialized:
        check_member(self._member, request.accumulator.member)
        if request.sharded and not request.spec.num_shards:
            raise InvalidArgumentError(
                "expected sharded=False or None, got True: the client has one server, and what is sharded is on "
                "several. That server is no aggregator of several, or the accumulator is private to the client",
                field="sharded",
            )
        key = decode_key(request.accumulator, call.identity)
        lifetime = decode_lifetime(request.lifetime, call.identity)
        work = PIECE_BYTES * len(request.spec.components)
        spec = await self._compute.run(work, _decode_spec, request.spec, self._member)
        if call.may_only_open is not None and not (
            self._registry.has(key, request.home_incarnation) or self._registry.belongs_to_another(key)
        ):
            raise call.may_only_open
        accumulator, created = self._registry.create(key, spec, lifetime, request.home_incarnation)
        await self._registry.settle()
        return await self._with_info(
            messages_pb2.CreateAccumulatorResponse(created=created), key, accumulator, lifetime
        )

    async def GetAccumulator(
        self, request: messages_pb2.GetAccumulatorRequest, call: Call
    ) -> messages_pb2.GetAccumulatorResponse | Serialized:
        key = decode_key(request.accumulator, call.identity)
        with self._using(request.accumulator, call) as accumulator:
            lifetime = self._registry.lifetime(key)
            return await self._with_info(messages_pb2.GetAccumulatorResponse(), key, accumulator, lifetime)

    async def ListAccumulators(
        self, request: messages_pb2.ListAccumulatorsRequest, call: Call
    ) -> messages_pb2.ListAccumulatorsResponse | Serialized:
        page = page_of(request.page_size, request.page_token, default_size=100)
        container = request.container or DEFAULT_CONTAINER
        found = self._registry.page(container, page.after, page.size + 1, user=call.identity)
        shown = page.filled(found, lambda entry: num_parts(entry[1]))
        described = [(self._id, key, each, each.state, self._registry.lifetime(key)) for key, each in shown]
        response = messages_pb2.ListAccumulatorsResponse(
            next_page_token=page.next_token(shown[-1][0].name if shown else "", is_last=len(shown) == len(found))
        )
        parts = sum([num_parts(each) for _, each in shown])
        return await assembled(
            self._compute, parts, response, [("accumulators", info_pieces(*each)) for each in described]
        )

    async def DeleteAccumulator(
        self, request: messages_pb2.DeleteAccumulatorRequest, call: Call
    ) -> messages_pb2.DeleteAccumulatorResponse:
        self._check_server(request.accumulator)
        key = decode_key(request.accumulator, call.identity)
        deleted = self._registry.delete(key, request.accumulator.incarnation, home_incarnation=request.home_incarnation)
        gone = self._registry.gone(key)
        await self._registry.settle()
        return messages_pb2.DeleteAccumulatorResponse(deleted=deleted, home_incarnation=gone)

    async def ApplyGradient(
        self, request: messages_pb2.ApplyGradientRequest, call: Call
    ) -> messages_pb2.ApplyGradientResponse:
        with self._deciding(request.accumulator, call) as accumulator:
            request_id, contribution, given = await self._decoded(accumulator, request, call)
            opening = await self._opening(accumulator, given, is_sum=bool(contribution.sum_of))
            applied, duplicate = await accumulator.apply(request_id, contribution, opening)
            return encode_applied(applied, duplicate=duplicate, num_rounds=accumulator.rounds.current.number)

    async def TakeGradient(self, request: messages_pb2.TakeGradientRequest, call: Call) -> WithContents:
        if call.may_only_open is not None and not self._registry.belongs_to_another(
            decode_key(request.accumulator, call.identity)
        ):
            raise call.may_only_open
        with (
            self._deciding(request.accumulator, call) as accumulator,
            self._registry.factory.waiting(call.identity),
            self._deliverer.begin(request.placement, call) as outgoing,
        ):
            average, duplicate = await accumulator.take(
                decode_take_id(request, call.identity), request.num_required, wait_timeout(request, call)
            )
            return await encode_taken(average, outgoing, duplicate=duplicate)

    async def ReadAverage(self, request: messages_pb2.ReadAverageRequest, call: Call) -> WithContents:
        with (
            self._deciding(request.accumulator, call) as accumulator,
            self._registry.factory.waiting(call.identity),
            self._deliverer.begin(request.placement, call) as outgoing,
        ):
            step = request.step if request.HasField("step") else None
            read = decode_read_id(request, call.identity)
            average = await accumulator.read_average(step, wait_timeout(request, call), read)
            return await encode_read(average, outgoing)

    async def PushPull(self, request: messages_pb2.PushPullRequest, call: Call) -> WithContents:
        with (
            self._deciding(request.accumulator, call) as accumulator,
            self._registry.factory.waiting(call.identity),
            self._deliverer.begin(request.placement, call) as outgoing,
        ):
            request_id, contribution, given = await self._decoded(accumulator, request, call)
            opening = await self._opening(accumulator, given, is_sum=bool(contribution.sum_of))
            applied, average, duplicate = await accumulator.push_pull(
                request_id,
                contribution,
                opening,
                request.num_required,
                wait_timeout(request, call),
                one_per_worker=counts_one_per_worker(request),
            )
            step = accumulator.rounds.global_step
            return await encode_pulled(applied, average, outgoing, duplicate=duplicate, global_step=step)

    async def GetNumAccumulated(
        self, request: messages_pb2.GetNumAccumulatedRequest, call: Call
    ) -> messages_pb2.GetNumAccumulatedResponse:
        with self._deciding(request.accumulator, call) as accumulator:
            rounds = accumulator.rounds
            return messages_pb2.GetNumAccumulatedResponse(
                num_accumulated=accumulator.num_accumulated,
                epoch=rounds.epoch,
                num_rounds=rounds.current.number,
            )

    async def SetGlobalStep(
        self, request: messages_pb2.SetGlobalStepRequest, call: Call
    ) -> messages_pb2.SetGlobalStepResponse:
        with self._deciding(request.accumulator, call) as accumulator:
            await accumulator.set_global_step(request.global_step, drop_gradients=request.drop_gradients)
        return messages_pb2.SetGlobalStepResponse()

    async def StageGradient(
        self, request: messages_pb2.StageGradientRequest, call: Call
    ) -> messages_pb2.StageGradientResponse:
        with self._using(request.accumulator, call) as accumulator:
            shard = _shard_of(accumulator)
            if request.is_sum:
                check_may_add(accumulator.name, accumulator.spec, "is_sum")
            check_is_of(request.home_incarnation, accumulator.name, accumulator.incarnation, "home_incarnation")
            sent = (request, call.payload, call.identity)
            key, withdrawn, given = await self._compute.run(PIECE_BYTES * len(request.gradient), decode_staged, *sent)
            if withdrawn:
                await shard.withdraw(withdrawn)
            opening = await self._opening(shard, given, is_sum=request.is_sum)
            duplicate = await shard.stage(
                key,
                request.local_step,
                opening,
                weight=weight_of(request),
                can_stage_again=request.can_stage_again,
                is_sum=request.is_sum,
                epoch=epoch_of(request),
            )
            return messages_pb2.StageGradientResponse(
                duplicate=duplicate, has_old_gradients=shard.asks_for_old_gradients()
            )

    async def EndEpoch(self, request: messages_pb2.EndEpochRequest, call: Call) -> messages_pb2.EndEpochResponse:
        with self._deciding(request.accumulator, call) as accumulator:
            epoch, counted = await accumulator.end_epoch()
            work = PIECE_BYTES * len(counted)
            return messages_pb2.EndEpochResponse(
                epoch=epoch, part_ids=await self._compute.run(work, lambda: [bytes.fromhex(each) for each in counted])
            )

    async def ForgetGradients(
        self, request: messages_pb2.ForgetGradientsRequest, call: Call
    ) -> messages_pb2.ForgetGradientsResponse:
        with self._using(request.accumulator, call) as accumulator:
            shard = _shard_of(accumulator)
            check_is_of(request.home_incarnation, accumulator.name, accumulator.incarnation, "home_incarnation")
            counted = await self._compute.run(PIECE_BYTES * len(request.part_ids), decode_counted, request)
            return messages_pb2.ForgetGradientsResponse(num_forgotten=await shard.forget(request.epoch, counted))

    async def ReduceGradients(self, request: messages_pb2.ReduceGradientsRequest, call: Call) -> WithContents:
        with (
            self._using(request.accumulator, call) as accumulator,
            self._deliverer.begin(request.placement, call) as outgoing,
        ):
            shard = _shard_of(accumulator)
            home = request.average.parts.home_incarnation
            if request.average.HasField("parts"):
                check_is_of(home, accumulator.name, accumulator.incarnation, "average.parts.home_incarnation")
            work = PIECE_BYTES * len(request.average.parts.part_ids)
            average = await shard.reduce(await self._compute.run(work, decode_decided, request.average))
            return await encode_reduced(average, outgoing)

    async def _with_info(
        self, response: _WithInfo, key: ResourceKey, accumulator: Accumulator, lifetime: Lifetime
    ) -> _WithInfo | Serialized:
        """Returns a response with the state of an accumulator; serialized if it has many components."""
        info = info_pieces(self._id, key, accumulator, accumulator.state, lifetime)
        return await assembled(self._compute, num_parts(accumulator), response, [("info", info)])

    async def _decoded(
        self, accumulator: Accumulator, request: GradientRequest, call: Call
    ) -> tuple[RequestId | None, Contribution, IncomingGradient]:
        sent = (request, call.payload, call.identity)
        work = PIECE_BYTES * len(request.gradient)
        request_id, contribution, given = await self._compute.run(work, decode_gradient, *sent)
        if accumulator.spec.num_shards:
            contribution = of_staged(accumulator.name, contribution, request_id, len(given.components))
        return request_id, contribution, given

    def _using(self, ref: accumulator_pb2.AccumulatorRef, call: Call) -> AbstractContextManager[Accumulator]:
        self._check_server(ref)
        return self._registry.use(decode_key(ref, call.identity), ref.incarnation)

    def _check_server(self, ref: accumulator_pb2.AccumulatorRef) -> None:
        """Checks that a call is for this server and this run of it, if it is for certain ones."""
        if ref.member:
            check_member(self._member, ref.member)
        if ref.server_incarnation not in ("", self._incarnation):
            raise AbortedError(
                f"the server was started again since accumulator {ref.name!r} was opened",
                field="accumulator.server_incarnation",
                code="GS_RESTARTED",
            )

    def _deciding(self, ref: accumulator_pb2.AccumulatorRef, call: Call) -> AbstractContextManager[Accumulator]:
        """Finds an accumulator as `_using` does, of which this server decides about rounds."""
        self._check_server(ref)
        key = decode_key(ref, call.identity)
        if self._member is not None:
            self._registry.check_is_home(key)
        return self._registry.use(key, ref.incarnation)

    async def _opening(self, adding: Accumulator | Shard, given: IncomingGradient, *, is_sum: bool) -> OpenGradient:
        spec = adding.sum_spec
        if is_sum and spec.components:
            spec = await self._compute.run(PIECE_BYTES * len(spec.components), lambda: adding.sum_spec.of_sums)
        return await self._receiver.receive(spec, adding.place, given)


def _shard_of(accumulator: Accumulator) -> Shard:
    if accumulator.shard is None:
        what = "has no components on this server" if accumulator.spec.num_shards else "is not sharded"
        raise InvalidArgumentError(f"accumulator {accumulator.name!r} {what}", field="accumulator.name")
    return accumulator.shard


def _decode_spec(spec: accumulator_pb2.AccumulatorSpec, member: Member | None) -> AccumulatorSpec:
    decoded = decode_accumulator_spec(spec)
    decoded.derive(0 if member is None else member.index)
    return decoded
