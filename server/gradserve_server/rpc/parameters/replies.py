"""Encodes replies of ParameterService: outcomes, versions, records of rounds, and descriptions of parameters."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from google.protobuf.timestamp_pb2 import Timestamp

from gradserve_protocol.codecs import Codec
from gradserve_protocol.messages import encode_codec
from gradserve_protocol.tensors import Contents, WithContents
from gradserve_protocol.v1 import accumulator_pb2, codecs_pb2, parameters_pb2, tensor_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_server.accumulators.gradient import Array, Measurement
from gradserve_server.accumulators.rounds import Outcome, Pushed
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.parameters.changes import Reported
from gradserve_server.parameters.metrics import Evaluation
from gradserve_server.parameters.parameters import Parameters, ParametersState
from gradserve_server.parameters.record import DecidedRound, RoundRecord
from gradserve_server.parameters.spec import Normalization, ParametersSpec, UpdateKind
from gradserve_server.parameters.variables import OptimizerState
from gradserve_server.parameters.versions import PackedValues, PackedVersions, Version
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.rpc.accumulators.replies import (
    OUTCOMES,
    ContentsOfAverage,
    ReplyEncoder,
    ServerId,
    add_average,
    component_values,
    encode_component,
    round_of,
)
from gradserve_server.rpc.boundary.chain import Codec as MessageCodec
from gradserve_server.rpc.boundary.fields import encode_durability, encode_idle_lease
from gradserve_server.rpc.boundary.messages import Entries, Piece
from gradserve_server.rpc.parameters.rules import (
    encode_optimizer,
    encode_reduction,
    encode_rules,
    encode_schedule,
    encode_staleness,
)
from gradserve_server.rpc.tensors.messages import OutgoingTensors

# Outcomes and versions


class PackedVersion(NamedTuple):
    """The components of a version, packed."""

    codec: Codec
    values: PackedValues


def encode_pushed(pushed: Pushed, *, duplicate: bool, num_rounds: int) -> messages_pb2.PushResponse:
    """Returns the response of a push, when `num_rounds` rounds have ended."""
    return messages_pb2.PushResponse(
        outcome=OUTCOMES[pushed.outcome],
        duplicate=duplicate,
        step=pushed.global_step,
        num_updates=pushed.num_accumulated,
        staleness=pushed.staleness,
        weight=pushed.weight,
        round=round_of(pushed),
        num_rounds=num_rounds,
    )


async def encode_pulled(
    outcome: Outcome,
    version: Version,
    outgoing: OutgoingTensors,
    *,
    staleness: int,
    weight: float,
    duplicate: bool,
    with_values: bool,
    packed: PackedVersion | None = None,
) -> WithContents:
    """Returns the response of a push_pull, with the version that it waited for, packed if that is given."""
    response = messages_pb2.PushPullParametersResponse(
        outcome=OUTCOMES[outcome], duplicate=duplicate, staleness=staleness, weight=weight
    )
    return await _with_version(response, version, outgoing, with_values=with_values, packed=packed)


async def encode_read(
    version: Version, outgoing: OutgoingTensors, *, with_values: bool, packed: PackedVersion | None = None
) -> WithContents:
    """Returns the response with a version, packed if that is given."""
    response = messages_pb2.ReadParametersResponse()
    return await _with_version(response, version, outgoing, with_values=with_values, packed=packed)


async def packed_version(
    versions: PackedVersions, version: Version, codec: Codec | None, *, with_values: bool
) -> PackedVersion | None:
    """Returns a version as a request asks for it; None if not packed.

    Raises:
        InvalidArgumentError: A value does not fit into the codec.
        ResourceExhaustedError: There is not enough memory.
    """
    return None if codec is None or not with_values else PackedVersion(codec, await versions.of(version, codec))


async def encode_read_state(
    version: Version, state: OptimizerState, outgoing: OutgoingTensors, *, with_values: bool
) -> WithContents:
    """Returns the response with a version, with its components if wanted, and the state of its optimizer."""
    values = (await add_average(version, outgoing)).values if with_values else {}
    work = PIECE_BYTES * sum([len(each) for each in state.slots.values()])
    await outgoing.add(await outgoing.compute.run(work, lambda: [array for _, _, array in _slots(state)]))

    def pieces(tensors: Iterator[tensor_pb2.Tensor]) -> Iterator[Piece]:
        yield encode_version(version)
        yield component_values(values, tensors)
        yield "state", _state_pieces(state, tensors)

    return await outgoing.reply(
        messages_pb2.ReadParametersResponse(), lambda tensors: [("version", pieces(tensors))], Contents()
    )


def encode_version(version: Version) -> parameters_pb2.Version:
    """Returns the message of a version without its components."""
    return parameters_pb2.Version(
        step=version.step,
        num_updates=version.num_gradients,
        total_weight=version.total_weight,
        worker_ids=version.worker_ids,
        digest=version.digest,
        decided=None if version.decided is None else _encode_decided(version.decided),
    )


def _encode_decided(decided: DecidedRound) -> parameters_pb2.DecidedRound:
    return parameters_pb2.DecidedRound(
        step=decided.step,
        optimizer=encode_optimizer(decided.optimizer),
        schedule=encode_schedule(decided.schedule),
        part_ids=map(bytes.fromhex, decided.part_ids),
        weights=decided.weights,
        loaded=bytes.fromhex(decided.loaded),
        oldest_version=decided.oldest_version,
        scales=decided.scales,
        factors=decided.factors,
        sums=[
            parameters_pb2.DecidedSum(index=each.place, num_updates=each.num_updates, discount=each.discount)
            for each in decided.sums
        ],
    )


def encode_measurement(measured: Measurement) -> parameters_pb2.Measurement:
    """Encodes what was measured of an update."""
    return parameters_pb2.Measurement(
        server=measured.server,
        squared_norm=measured.squared_norm,
        squared_distances=[
            parameters_pb2.SquaredDistance(part_id=bytes.fromhex(part), terms=terms)
            for part, terms in measured.squared_distances.items()
        ],
    )


async def _with_version(
    response: messages_pb2.ReadParametersResponse | messages_pb2.PushPullParametersResponse,
    version: Version,
    outgoing: OutgoingTensors,
    *,
    with_values: bool,
    packed: PackedVersion | None,
) -> WithContents:
    if not with_values:
        response.version.CopyFrom(encode_version(version))
        return WithContents(response, Contents())
    contents = ContentsOfAverage(average=version)
    if packed is not None:
        return await _with_packed(response, version, packed, outgoing, contents)
    added = await add_average(version, outgoing)

    def pieces(tensors: Iterator[tensor_pb2.Tensor]) -> Iterator[Piece]:
        yield encode_version(version)
        yield component_values(added.values, tensors)

    return await outgoing.reply(response, lambda tensors: [("version", pieces(tensors))], contents)


async def _with_packed(
    response: messages_pb2.ReadParametersResponse | messages_pb2.PushPullParametersResponse,
    version: Version,
    packed: PackedVersion,
    outgoing: OutgoingTensors,
    contents: Contents,
) -> WithContents:
    await outgoing.add(list(packed.values.values()), shared=True)
    codec = encode_codec(packed.codec)

    def pieces(tensors: Iterator[tensor_pb2.Tensor]) -> Iterator[Piece]:
        head = encode_version(version)
        head.codec = codec
        yield head
        components = (
            accumulator_pb2.ComponentGradient(
                name=name, packed=codecs_pb2.PackedTensor(codec=codec, data=next(tensors))
            )
            for name in packed.values
        )
        yield Entries("components", components)

    return await outgoing.reply(response, lambda tensors: [("version", pieces(tensors))], contents)


def _state_pieces(state: OptimizerState, tensors: Iterator[tensor_pb2.Tensor]) -> Iterator[Piece]:
    yield parameters_pb2.OptimizerState(
        component_steps=state.component_steps.values(),
        rounds=state.rounds,
        optimizer=encode_optimizer(state.optimizer),
    )
    slots = (
        parameters_pb2.Slot(name=name, component=component, value=next(tensors)) for name, component, _ in _slots(state)
    )
    yield Entries("slots", slots)


def _slots(state: OptimizerState) -> Iterator[tuple[str, str, Array]]:
    """Yields the slot, the component and the array of each value of a state, in the order of components."""
    for component in state.component_steps:
        for name, values in state.slots.items():
            if component in values:
                yield name, component, values[component]


def reply_codecs() -> Mapping[str, MessageCodec]:
    """Returns the serializers of the methods whose replies several calls may get."""
    return {method: MessageCodec(encode=ReplyEncoder()) for method in ("PushPullParameters", "ReadParameters")}


# Descriptions of parameters

_UPDATE_CODES = {
    UpdateKind.DELTA: parameters_pb2.UPDATE_KIND_DELTA,
    UpdateKind.GRADIENT: parameters_pb2.UPDATE_KIND_GRADIENT,
}


_NORMALIZATION_CODES = {
    Normalization.WEIGHTS: parameters_pb2.NORMALIZATION_WEIGHTS,
    Normalization.COUNT: parameters_pb2.NORMALIZATION_COUNT,
}


def num_parts(parameters: Parameters) -> int:
    """Returns the number of parts that the message of parameters has."""
    spec = parameters.spec
    return len(parameters.rounds.members.workers) + spec.updates.num_parts + 2 * len(spec.agreement)


def info_pieces(
    server: ServerId, key: ResourceKey, parameters: Parameters, state: ParametersState, lifetime: Lifetime
) -> Iterator[Piece]:
    """Yields the message of parameters of this server in pieces. Can run in any thread."""
    yield parameters_pb2.ParametersInfo(
        parameters=parameters_pb2.ParametersRef(
            container=key.container, name=key.name, incarnation=parameters.incarnation, member=server.member
        ),
        step=state.step,
        digest=state.digest,
        num_updates=state.num_updates,
        num_waiting=state.num_waiting,
        num_bytes=state.num_bytes,
        worker_ids=state.worker_ids,
        kept_steps=state.kept_steps,
        is_private=bool(lifetime.owner),
        idle_lease=encode_idle_lease(lifetime),
        server_incarnation=server.incarnation,
        weights=parameters_pb2.WeightLedger(
            accepted=state.weights.accepted,
            applied=state.weights.applied,
            pending=state.weights.pending,
            refused=state.weights.refused,
        ),
        epoch=parameters.rounds.epoch,
    )
    yield "spec", _spec_pieces(parameters.spec)


def _spec_pieces(spec: ParametersSpec) -> Iterator[Piece]:
    yield parameters_pb2.ParametersSpec(
        update=_UPDATE_CODES[spec.update],
        optimizer=encode_optimizer(spec.rules.optimizer),
        schedule=encode_schedule(spec.rules.schedule),
        rounds=encode_rules(spec.rules.rounds),
        staleness=encode_staleness(spec.staleness),
        normalization=_NORMALIZATION_CODES[spec.normalization],
        reduction=encode_reduction(spec.reduction),
        clip_norm=spec.clip_norm,
        keep_versions=spec.keep_versions,
        deterministic=spec.deterministic,
        accept_non_finite=not spec.refuse_non_finite,
        many_per_worker=not spec.one_per_worker,
        durability=encode_durability(spec.durability),
        agreement=spec.agreement,
        keep_rounds=spec.keep_rounds,
        num_shards=spec.num_shards,
    )
    yield Entries("components", map(encode_component, spec.components))


# Records of rounds


def encode_evaluation(evaluation: Evaluation, *, with_workers: bool = True) -> parameters_pb2.Evaluation:
    """Returns the message of an evaluation. On the event loop only: it may change meanwhile."""
    return parameters_pb2.Evaluation(
        step=evaluation.step,
        metrics=evaluation.metrics,
        weight=evaluation.weight,
        worker_ids=evaluation.worker_ids if with_workers else (),
        num_reports=evaluation.num_reports,
    )


def encode_reported(reported: Reported) -> messages_pb2.ReportEvaluationResponse:
    """Returns the response to a report on a version."""
    return messages_pb2.ReportEvaluationResponse(
        outcome=OUTCOMES[reported.outcome],
        duplicate=reported.is_duplicate,
        evaluation=encode_evaluation(reported.evaluation, with_workers=False),
    )


def encode_record(record: RoundRecord, evaluation: parameters_pb2.Evaluation | None) -> parameters_pb2.RoundRecord:
    """Returns the message of a round's record, with the evaluation of the version that it made, if there is one."""
    end_time = Timestamp()
    end_time.FromNanoseconds(record.end_time)
    return parameters_pb2.RoundRecord(
        step=record.step,
        reason=record.reason,
        end_time=end_time,
        updates=[
            parameters_pb2.RoundUpdate(
                worker_id=each.worker_id,
                weight_asked=each.weight_asked,
                weight=each.weight,
                staleness=each.staleness,
                norm=each.norm,
                cosine=each.cosine,
                num_bytes=each.num_bytes,
                dropped=each.dropped,
                metrics=dict(each.metrics),
            )
            for each in record.updates
        ],
        refusals=[
            parameters_pb2.Refusal(worker_id=each.worker_id, weight=each.weight, reason=each.reason)
            for each in record.refusals
        ],
        digest_before=record.digest_before,
        digest_after=record.digest_after,
        lr=record.lr,
        optimizer=encode_optimizer(record.optimizer),
        hash=record.hash,
        decided=None if record.decided is None else _encode_decided(record.decided),
        metrics=record.metrics,
        evaluation=evaluation,
    )
