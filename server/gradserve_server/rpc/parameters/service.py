"""ParameterService: decode, call the domain, encode."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import TypeVar

from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.accumulators.gradient import Contribution, OpenGradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import GradientReceiver, IncomingGradient, components_named
from gradserve_server.accumulators.sharding.home import part_id
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.errors import AbortedError, InvalidArgumentError, NotFoundError, request_fields
from gradserve_server.limits import MAX_ID_BYTES, check_length
from gradserve_server.parameters.metrics import Evaluation
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import RoundRecord
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.variables import Loaded
from gradserve_server.resources.cluster import Member, check_member
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.accumulators.replies import ServerId
from gradserve_server.rpc.accumulators.requests import decode_counted
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import decode_lifetime, page_of, time_to_wait, wait_timeout
from gradserve_server.rpc.boundary.messages import Entries, Serialized, assembled
from gradserve_server.rpc.parameters.replies import (
    encode_evaluation,
    encode_measurement,
    encode_pulled,
    encode_pushed,
    encode_read,
    encode_read_state,
    encode_record,
    encode_reported,
    info_pieces,
    num_parts,
    packed_version,
)
from gradserve_server.rpc.parameters.requests import (
    IncomingVersion,
    decode_change_id,
    decode_changes,
    decode_codec,
    decode_evaluations_page,
    decode_key,
    decode_parameters_spec,
    decode_read_id,
    decode_records_page,
    decode_state_optimizer,
    decode_step,
    decode_version,
)
from gradserve_server.rpc.parameters.updates import (
    UpdateRequest,
    decode_decided,
    decode_report,
    decode_staged,
    decode_staged_update,
    decode_update,
    names_in,
)
from gradserve_server.rpc.tensors.messages import TensorDeliverer
from gradserve_server.tensors.incoming import TensorOpener

_METRICS_OF_A_PART = 8
"""The metrics or ids that take as long to encode as an update in a record."""
_FIELD = "parameters"
"""The field that names the parameters of a request."""

_WithInfo = TypeVar(
    "_WithInfo",
    messages_pb2.CreateParametersResponse,
    messages_pb2.GetParametersResponse,
    messages_pb2.ChangeParametersResponse,
    messages_pb2.ForkParametersResponse,
)


class ParameterServicer:
    """Serves the parameters of a registry. The protos say what each method does."""

    def __init__(
        self,
        registry: ParametersRegistry,
        opener: TensorOpener,
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
        self._opener = opener
        self._receiver = receiver
        self._deliverer = deliverer
        self._compute = compute

    async def CreateParameters(
        self, request: messages_pb2.CreateParametersRequest, call: Call
    ) -> messages_pb2.CreateParametersResponse | Serialized:
        key = self._key(request.parameters, call, at_home=not request.spec.num_shards)
        lifetime = decode_lifetime(request.lifetime, call.identity)
        check_length(request.creator, MAX_ID_BYTES, "creator")
        work = PIECE_BYTES * len(request.spec.components)
        spec = await self._compute.run(work, decode_parameters_spec, request.spec, key, self._member)
        creators = self._registry.creators
        home_incarnation = request.home_incarnation
        check_length(home_incarnation, MAX_ID_BYTES, "home_incarnation")
        if spec.num_shards and not spec.follows and request.values and not request.creator:
            raise InvalidArgumentError("expected a creator of sharded parameters, got none", field="creator")
        if request.sharded and not spec.num_shards:
            raise InvalidArgumentError(
                "expected sharded=False, got True: the client has one server, and what is sharded is on several. That "
                "server is no aggregator of several, or the parameters are private to the client",
                field="sharded",
            )
        try:
            version = await self._decoded_version(request, call)
            if call.may_only_open is not None:
                # Without values, the call only finds parameters: it learns whether they exist.
                if version is not None and not self._registry.has(key):
                    raise call.may_only_open
            elif version is None and request.creator:
                with self._registry.factory.waiting(call.identity):
                    exists, timeout = partial(self._registry.has, key), time_to_wait(call)
                    await creators.turn(key, request.creator, spec.version_bytes, exists, timeout)
                if spec.num_shards and not spec.follows and not self._registry.has(key):
                    incarnation = self._registry.hand_out(key)
                    await self._registry.settle()
                    return messages_pb2.CreateParametersResponse(home_incarnation=incarnation)
            async with self._opened(version, spec.here.components, release=request.release_handles) as loaded:
                parameters, created = await self._registry.create(key, spec, lifetime, loaded, home_incarnation)
        except NotFoundError as error:
            error.is_awaited = bool(request.creator)  # it sends values next
            raise
        finally:
            if request.values:
                creators.end(key, request.creator)
        await self._registry.settle()
        return await self._with_info(messages_pb2.CreateParametersResponse(created=created), key, parameters)

    async def GetParameters(
        self, request: messages_pb2.GetParametersRequest, call: Call
    ) -> messages_pb2.GetParametersResponse | Serialized:
        with self._using_shard(request.parameters, call) as parameters:
            key = decode_key(request.parameters, call.identity)
            return await self._with_info(messages_pb2.GetParametersResponse(), key, parameters)

    async def ListParameters(
        self, request: messages_pb2.ListParametersRequest, call: Call
    ) -> messages_pb2.ListParametersResponse | Serialized:
        page = page_of(request.page_size, request.page_token, default_size=100)
        container = request.container or DEFAULT_CONTAINER
        found = self._registry.page(container, page.after, page.size + 1, user=call.identity)
        shown = page.filled(found, lambda entry: num_parts(entry[1]))
        described = [(self._id, key, each, each.state, self._registry.lifetime(key)) for key, each in shown]
        response = messages_pb2.ListParametersResponse(
            next_page_token=page.next_token(shown[-1][0].name if shown else "", is_last=len(shown) == len(found))
        )
        parts = sum([num_parts(each) for _, each in shown])
        return await assembled(
            self._compute, parts, response, [("parameters", info_pieces(*each)) for each in described]
        )

    async def DeleteParameters(
        self, request: messages_pb2.DeleteParametersRequest, call: Call
    ) -> messages_pb2.DeleteParametersResponse:
        key = self._key(request.parameters, call, at_home=not request.home_incarnation)
        deleted = self._registry.delete(key, request.parameters.incarnation, home_incarnation=request.home_incarnation)
        gone = self._registry.gone(key)
        await self._registry.settle()
        return messages_pb2.DeleteParametersResponse(deleted=deleted, home_incarnation=gone)

    async def ReadParameters(self, request: messages_pb2.ReadParametersRequest, call: Call) -> WithContents:
        step, optimizer, codec = decode_step(request), decode_state_optimizer(request), decode_codec(request)
        work = PIECE_BYTES * sum([1 + len(each.part_ids) for each in request.decided])
        decided = await self._compute.run(work, decode_decided, request.decided)
        with (
            self._using_shard(request.parameters, call) as parameters,
            self._registry.factory.waiting(call.identity),
            self._deliverer.begin(request.placement, call) as outgoing,
        ):
            if decided:
                await parameters.follow(decided)
            if request.with_state:
                async with parameters.reading_state(optimizer) as (version, state):
                    return await encode_read_state(version, state, outgoing, with_values=not request.without_values)
            read = decode_read_id(request, call.identity)
            version = await parameters.read(step, wait_timeout(request, call), read)
            with_values = not request.without_values
            packed = await packed_version(parameters.packed, version, codec, with_values=with_values)
            return await encode_read(version, outgoing, with_values=with_values, packed=packed)

    async def Push(self, request: messages_pb2.PushRequest, call: Call) -> messages_pb2.PushResponse:
        with self._using(request.parameters, call) as parameters:
            request_id, contribution, opening = await self._received(parameters, request, call)
            pushed, duplicate = await parameters.push(request_id, contribution, opening)
            return encode_pushed(pushed, duplicate=duplicate, num_rounds=parameters.rounds.current.number)

    async def PushPullParameters(self, request: messages_pb2.PushPullParametersRequest, call: Call) -> WithContents:
        codec, with_values = decode_codec(request), not request.without_values
        with (
            self._using(request.parameters, call) as parameters,
            self._registry.factory.waiting(call.identity),
            self._deliverer.begin(request.placement, call) as outgoing,
        ):
            request_id, contribution, opening = await self._received(parameters, request, call)
            pushed, version, duplicate = await parameters.push_pull(
                request_id, contribution, opening, wait_timeout(request, call)
            )
            return await encode_pulled(
                pushed.outcome,
                version,
                outgoing,
                staleness=pushed.staleness,
                weight=pushed.weight,
                duplicate=duplicate,
                with_values=with_values,
                packed=await packed_version(parameters.packed, version, codec, with_values=with_values),
            )

    async def StageUpdate(
        self, request: messages_pb2.StageUpdateRequest, call: Call
    ) -> messages_pb2.StageUpdateResponse:
        with self._using_shard(request.parameters, call) as parameters:
            shard = _shard_of(parameters)
            sent = (request, call.payload, call.identity)
            key, withdrawn, given = await self._compute.run(PIECE_BYTES * len(request.update), decode_staged, *sent)
            if withdrawn:
                await shard.withdraw(withdrawn)
            is_wide, work = request.is_wide, PIECE_BYTES * len(request.update)
            spec = await self._compute.run(work, lambda: _update_spec(parameters, given, is_wide=is_wide))
            opening = await self._receiver.receive(spec, parameters.place, given)
            duplicate = await shard.stage(key, request.local_step, opening, is_sum=is_wide, epoch=request.epoch)
            measured = await parameters.measure(key)
            return messages_pb2.StageUpdateResponse(
                duplicate=duplicate,
                has_old_updates=shard.asks_for_old_gradients(),
                measured=None if measured is None else encode_measurement(measured),
            )

    async def CountUpdates(
        self, request: messages_pb2.CountUpdatesRequest, call: Call
    ) -> messages_pb2.CountUpdatesResponse:
        with self._using(request.parameters, call) as parameters:
            epoch, counted = await parameters.count_updates()
            work = PIECE_BYTES * len(counted)
            ids = await self._compute.run(work, lambda: [bytes.fromhex(each) for each in counted])
            return messages_pb2.CountUpdatesResponse(epoch=epoch, part_ids=ids)

    async def ForgetUpdates(
        self, request: messages_pb2.ForgetUpdatesRequest, call: Call
    ) -> messages_pb2.ForgetUpdatesResponse:
        with self._using_shard(request.parameters, call) as parameters:
            shard = _shard_of(parameters)
            counted = await self._compute.run(PIECE_BYTES * len(request.part_ids), decode_counted, request)
            return messages_pb2.ForgetUpdatesResponse(num_forgotten=await shard.forget(request.epoch, counted))

    async def ChangeParameters(
        self, request: messages_pb2.ChangeParametersRequest, call: Call
    ) -> messages_pb2.ChangeParametersResponse | Serialized:
        with self._using_shard(request.parameters, call) as parameters:
            version = await self._decoded_version(request, call)
            work = 0 if version is None else PIECE_BYTES * len(version.tensors)
            request_id = await self._compute.run(work, decode_change_id, request, version, call.identity)
            if version is not None and parameters.shard is not None and request_id is None:
                raise InvalidArgumentError(
                    "expected a request_id with values of sharded parameters, got none", field="request_id"
                )
            async with self._opened(version, parameters.here.components, release=request.release_handles) as loaded:
                if parameters.spec.follows:
                    await self._hold(parameters, request_id, loaded)
                else:
                    await parameters.change(request_id, decode_changes(request, loaded))
            key = decode_key(request.parameters, call.identity)
            return await self._with_info(messages_pb2.ChangeParametersResponse(), key, parameters)

    async def ListRounds(
        self, request: messages_pb2.ListRoundsRequest, call: Call
    ) -> messages_pb2.ListRoundsResponse | Serialized:
        since, page = decode_records_page(request)
        with self._using(request.parameters, call) as parameters:
            records, has_more = parameters.records(since, page.size)
            evaluations = parameters.ledger.evaluations
        found = [(each, evaluations.of(each.step)) for each in records]
        shown = page.filled(found, lambda each: _num_entries(each[0]) + _num_workers(each[1]))
        response = messages_pb2.ListRoundsResponse(has_more=has_more or len(shown) < len(records))
        parts = sum([1 + _num_entries(record) + _num_workers(evaluation) for record, evaluation in shown])
        evaluated = [None if evaluation is None else encode_evaluation(evaluation) for _, evaluation in shown]
        rounds = map(encode_record, [record for record, _ in shown], evaluated)
        return await assembled(self._compute, parts, response, [Entries("rounds", rounds)])

    async def ReportEvaluation(
        self, request: messages_pb2.ReportEvaluationRequest, call: Call
    ) -> messages_pb2.ReportEvaluationResponse:
        with self._using(request.parameters, call) as parameters:
            request_id, report = decode_report(request, call.identity)
            return encode_reported(await parameters.report(request_id, report))

    async def ListEvaluations(
        self, request: messages_pb2.ListEvaluationsRequest, call: Call
    ) -> messages_pb2.ListEvaluationsResponse:
        since, page = decode_evaluations_page(request)
        with self._using(request.parameters, call) as parameters:
            evaluations, has_more = parameters.evaluations(since, page.size)
            shown = page.filled(evaluations, _num_workers)
            return messages_pb2.ListEvaluationsResponse(
                evaluations=map(encode_evaluation, shown), has_more=has_more or len(shown) < len(evaluations)
            )

    async def ForkParameters(
        self, request: messages_pb2.ForkParametersRequest, call: Call
    ) -> messages_pb2.ForkParametersResponse | Serialized:
        lifetime = decode_lifetime(request.lifetime, call.identity)
        step = request.step if request.HasField("step") else None
        with self._using(request.parameters, call) as parameters, request_fields({_FIELD: "fork"}):
            key = self._key(request.fork, call)
            source = decode_key(request.parameters, call.identity)
            fork = await self._registry.fork(source, parameters.incarnation, step, key, lifetime)
        await self._registry.settle()
        return await self._with_info(messages_pb2.ForkParametersResponse(), key, fork)

    async def _with_info(self, response: _WithInfo, key: ResourceKey, parameters: Parameters) -> _WithInfo | Serialized:
        """Returns a response with the state of parameters; serialized if they have many components."""
        info = info_pieces(self._id, key, parameters, parameters.state, self._registry.lifetime(key))
        return await assembled(self._compute, num_parts(parameters), response, [("info", info)])

    async def _received(
        self, parameters: Parameters, request: UpdateRequest, call: Call
    ) -> tuple[RequestId | None, Contribution, OpenGradient]:
        """Returns an update once it has arrived."""
        work = PIECE_BYTES * len(request.update)
        if parameters.shard is not None:
            work = PIECE_BYTES * sum([1 + len(each.squared_distances) for each in request.measured])
            of_what = (request, parameters.incarnation, parameters.spec, call.identity)
            staged_id, staged, part = await self._compute.run(work, decode_staged_update, *of_what)
            return staged_id, staged, parameters.shard.opening(part)
        sent = (request, call.payload, call.identity)
        request_id, contribution, given = await self._compute.run(work, decode_update, *sent)
        is_sum = bool(contribution.sum_of)
        spec = await self._compute.run(work, lambda: _update_spec(parameters, given, is_sum=is_sum))
        return request_id, contribution, await self._receiver.receive(spec, parameters.place, given)

    async def _decoded_version(
        self, request: messages_pb2.CreateParametersRequest | messages_pb2.ChangeParametersRequest, call: Call
    ) -> IncomingVersion | None:
        work = PIECE_BYTES * (len(request.values) + len(request.state.slots))
        return await self._compute.run(work, decode_version, request, call.payload, call.identity)

    @asynccontextmanager
    async def _opened(
        self, version: IncomingVersion | None, components: Sequence[ComponentSpec], *, release: bool
    ) -> AsyncIterator[Loaded | None]:
        """Holds the tensors of a saved version, on the host, until the end of the block."""
        if version is None:
            yield None
            return
        with components_named("values", version.values):
            async with self._opener.open(version.tensors, release=release, on_host=True):
                yield await self._compute.run(PIECE_BYTES * len(version.tensors), version.loaded, components)

    @staticmethod
    async def _hold(parameters: Parameters, request_id: RequestId | None, loaded: Loaded | None) -> None:
        if request_id is None or loaded is None:
            raise InvalidArgumentError(
                f"expected values on a server that is not the home of sharded parameters {parameters.name!r}, got none",
                field="values",
            )
        await parameters.hold(part_id(request_id), loaded)

    def _using(self, ref: parameters_pb2.ParametersRef, call: Call) -> AbstractContextManager[Parameters]:
        """Finds parameters at their home, for a call that only the home answers."""
        return self._registry.use(self._key(ref, call), ref.incarnation)

    def _using_shard(self, ref: parameters_pb2.ParametersRef, call: Call) -> AbstractContextManager[Parameters]:
        """Finds parameters, or the shard of some with another home, whose incarnation a request names then."""
        return self._registry.use(self._key(ref, call, at_home=not ref.incarnation), ref.incarnation)

    def _key(self, ref: parameters_pb2.ParametersRef, call: Call, *, at_home: bool = True) -> ResourceKey:
        """Returns the key of parameters that a request names, if the call is for this server and this run of it.

        Args:
            ref: Their name.
            call: The call.
            at_home: Whether the call is one for their home, which decides, rather than one for any shard.

        Raises:
            InvalidArgumentError: The call is for another server of the cluster, or the parameters belong to one.
            AbortedError: It is for an earlier run of the server.
        """
        check_member(self._member, ref.member, _FIELD)
        if ref.server_incarnation not in ("", self._incarnation):
            raise AbortedError(
                f"the server was started again since parameters {ref.name!r} were opened",
                field=f"{_FIELD}.server_incarnation",
                code="GS_RESTARTED",
            )
        key = decode_key(ref, call.identity)
        if at_home and self._member is not None and ref.name:
            self._member.check_home(key, _FIELD)
        return key


def _shard_of(parameters: Parameters) -> Shard:
    if parameters.shard is None:
        raise InvalidArgumentError(f"parameters {parameters.name!r} are not sharded", field=f"{_FIELD}.name")
    return parameters.shard


def _update_spec(
    parameters: Parameters, given: IncomingGradient, *, is_sum: bool = False, is_wide: bool = False
) -> AccumulatorSpec:
    spec, is_part = parameters.here, parameters.shard is not None
    return spec.of_update(names_in(given, spec.components), is_sum=is_sum, is_part=is_part, is_wide=is_wide)


def _num_entries(record: RoundRecord) -> int:
    num_metrics = sum([len(each.metrics) for each in record.updates])
    return len(record.updates) + len(record.refusals) + num_metrics // _METRICS_OF_A_PART


def _num_workers(evaluation: Evaluation | None) -> int:
    return 0 if evaluation is None else len(evaluation.worker_ids) // _METRICS_OF_A_PART
