"""Decodes updates in requests of ParameterService, with the ids of their calls, and the rounds made of them."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.accumulators.gradient import Contribution, Measurement, Metrics, Summand
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import IncomingGradient
from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.sharding.home import part_id
from gradserve_server.accumulators.spec import ComponentSpec
from gradserve_server.errors import AbortedError, InvalidArgumentError
from gradserve_server.limits import (
    MAX_METRIC_NAME_BYTES,
    MAX_METRICS,
    MAX_SUMMANDS,
    MAX_UNANSWERED,
    MAX_WORKER_ID_BYTES,
    check_count,
    check_length,
)
from gradserve_server.parameters.metrics import Report, canonical
from gradserve_server.parameters.record import DecidedRound, DecidedSum
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.rpc.accumulators.gradients import (
    contribution_of,
    decode_request_id,
    gradient_id,
    incoming_gradient,
    serialized,
    summands_of,
    weight_of,
)
from gradserve_server.rpc.accumulators.requests import check_ids
from gradserve_server.rpc.parameters.rules import decode_optimizer, decode_schedule
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.incoming import IncomingTensors
from gradserve_server.tensors.payload import Payload

UpdateRequest = messages_pb2.PushRequest | messages_pb2.PushPullParametersRequest


def decode_update(
    request: UpdateRequest, payload: Payload, user: Identity = ANONYMOUS
) -> tuple[RequestId | None, Contribution, IncomingGradient]:
    """Reads the id of an update's call, its step, weight and sender, and its components.

    Raises:
        InvalidArgumentError: It has no components or too many, or an id is not valid; or it has measurements.
    """
    if not request.update:
        raise InvalidArgumentError("expected at least one component, got none", field="update")
    if request.measured:
        raise InvalidArgumentError(
            f"expected no measurements of parameters on one server, got {len(request.measured)}", field="measured"
        )
    is_again = isinstance(request, messages_pb2.PushRequest) and request.accepted_before
    sum_of, metrics = _summands_and_metrics(request, user)
    contribution = contribution_of(request, was_accepted=is_again, sum_of=sum_of, metrics=metrics)
    given = incoming_gradient(
        request.update,
        payload,
        user,
        release=request.release_handles,
        path="update",
        may_be_packed=not request.sum_of,
    )
    call = None
    if request.HasField("request_id"):
        what = _what_of(request, contribution)
        summands = serialized(request.sum_of)
        call = gradient_id(request.request_id, what, given, user, unread=request.unread_contents, more=summands)
    return call, contribution, given


def _summands_and_metrics(request: UpdateRequest, user: Identity) -> tuple[tuple[Summand, ...], Metrics]:
    """Reads the updates of a sum, none of a single update, and the metrics of that."""
    sum_of = summands_of(request, user, decode_metrics)
    metrics = decode_metrics(request.metrics, "metrics")
    if metrics and sum_of:
        raise InvalidArgumentError("expected no metrics beside those of sum_of, got some", field="metrics")
    return sum_of, metrics


def _what_of(request: UpdateRequest, contribution: Contribution) -> tuple[object, ...]:
    """Returns what the call of an update repeats; without metrics, as earlier servers have noted it."""
    what = (type(request).__name__, request.local_step, contribution.weight, request.worker_id)
    return (*what, contribution.metrics) if contribution.metrics else what


def decode_metrics(metrics: Mapping[str, float], field: str) -> Metrics:
    """Reads metrics.

    Raises:
        InvalidArgumentError: They are too many, or a name is empty or too long.
    """
    if not metrics:
        return ()
    check_count(metrics, MAX_METRICS, "metrics", field)
    for name in metrics:
        if not name:
            raise InvalidArgumentError("expected names of metrics, got an empty one", field=field)
        check_length(name, MAX_METRIC_NAME_BYTES, field)
    return canonical(metrics)


def decode_report(
    request: messages_pb2.ReportEvaluationRequest, user: Identity = ANONYMOUS
) -> tuple[RequestId | None, Report]:
    """Reads the id of a report's call, and the report.

    Raises:
        InvalidArgumentError: There is no metric, or one, the weight or the sender is not within its limits.
    """
    metrics = decode_metrics(request.metrics, "metrics")
    if not metrics:
        raise InvalidArgumentError("expected at least one metric, got none", field="metrics")
    weight = weight_of(request)
    if not 0 < weight < math.inf:
        raise InvalidArgumentError(f"expected a positive, finite weight, got {weight:g}", field="weight")
    check_length(request.worker_id, MAX_WORKER_ID_BYTES, "worker_id")
    call = None
    if request.HasField("request_id"):
        what = (type(request).__name__, request.step, metrics, weight, request.worker_id)
        call = gradient_id(request.request_id, what, IncomingGradient([], IncomingTensors(())), user)
    return call, Report(request.step, metrics, weight, request.worker_id)


def decode_staged_update(
    request: UpdateRequest, incarnation: str, spec: ParametersSpec, user: Identity = ANONYMOUS
) -> tuple[RequestId, Contribution, PartKey]:
    """Reads the id of an update's call, its step, weight and sender, and the name under which it was staged.

    Args:
        request: A request for sharded parameters.
        incarnation: Their incarnation.
        spec: Their properties.
        user: The caller.

    Raises:
        InvalidArgumentError: It has components, or no id; or is the sum of several updates, and each is needed; or its
            measurements are not those of the other servers.
        AbortedError: It is to be staged again.
    """
    if request.update:
        raise InvalidArgumentError(
            f"expected no components, as parameters {request.parameters.name!r} are sharded over several servers, and "
            f"StageUpdate takes them, got {len(request.update)}: connect to all servers of the cluster",
            field="update",
        )
    if not request.HasField("request_id"):
        raise InvalidArgumentError(
            f"expected a request_id, as parameters {request.parameters.name!r} are sharded", field="request_id"
        )
    epoch = request.epoch if request.HasField("epoch") else None
    sum_of, metrics = _summands_and_metrics(request, user)
    if sum_of:
        spec.check_adds_up()
    plain = contribution_of(request, epoch=epoch, sum_of=sum_of, metrics=metrics)
    nothing = IncomingGradient([], IncomingTensors(()))
    call = gradient_id(request.request_id, _what_of(request, plain), nothing, user, more=serialized(request.sum_of))
    contribution = replace(plain, part=part_id(call), measured=_measurements(request, spec))
    return call, contribution, PartKey(incarnation, contribution.part)


def decode_staged(
    request: messages_pb2.StageUpdateRequest, payload: Payload, user: Identity = ANONYMOUS
) -> tuple[PartKey, Sequence[PartKey], IncomingGradient]:
    """Reads the name of an update that is to be held for a round, those that its client withdraws, and its components.

    Raises:
        InvalidArgumentError: It has too many parts, or no id.
    """
    check_count(request.withdrawn, MAX_UNANSWERED, "numbers", "withdrawn")
    call = decode_request_id(request.request_id, b"", user)
    key, *withdrawn = [
        PartKey(request.parameters.incarnation, part_id(RequestId(call.client_id, sequence)))
        for sequence in (call.sequence, *request.withdrawn)
    ]
    given = incoming_gradient(
        request.update,
        payload,
        user,
        release=request.release_handles,
        path="update",
        may_be_packed=not request.is_wide,
    )
    return key, withdrawn, given


def decode_decided(rounds: Sequence[parameters_pb2.DecidedRound]) -> list[DecidedRound]:
    """Reads rounds that the home of sharded parameters has ended.

    Raises:
        InvalidArgumentError: They are no such rounds, or not in order.
    """
    check_count(rounds, _MOST_DECIDED, "rounds", "decided")
    decoded: list[DecidedRound] = []
    for index, each in enumerate(rounds):
        field = f"decided[{index}]"
        ids = each.part_ids
        if bool(ids) is bool(each.loaded) or len(ids) != len(each.weights) or len(set(ids)) < len(ids):
            raise InvalidArgumentError(
                f"expected either `loaded` or different ids with a weight each, got {len(ids)} ids and "
                f"{len(each.weights)} weights",
                field=f"{field}.part_ids",
            )
        check_ids([*ids, *([each.loaded] if each.loaded else [])], f"{field}.part_ids")
        for weight in each.weights:
            if not 0 < weight < math.inf:
                raise InvalidArgumentError(
                    f"expected positive, finite weights, got {weight:g}", field=f"{field}.weights"
                )
        if decoded and each.step <= decoded[-1].step:
            raise InvalidArgumentError(
                f"expected steps that increase, got {decoded[-1].step} and {each.step}", field=f"{field}.step"
            )
        decoded.append(
            DecidedRound(
                each.step,
                decode_optimizer(each.optimizer, f"{field}.optimizer"),
                decode_schedule(each.schedule, f"{field}.schedule"),
                tuple([part.hex() for part in ids]),
                tuple(each.weights),
                each.loaded.hex(),
                each.oldest_version,
                _shares(each.scales, ids, f"{field}.scales", least=math.ulp(0.0), most=1.0),
                _shares(each.factors, ids, f"{field}.factors"),
                _sums(each.sums, ids, f"{field}.sums"),
            )
        )
    return decoded


_MOST_DECIDED = 1 << 16
_MOST_TERMS = 64


def _shares(
    given: Sequence[float], ids: Sequence[bytes], field: str, least: float = 0.0, most: float = sys.float_info.max
) -> tuple[float, ...]:
    """Reads a number for each update of a round, or for none."""
    if given and len(given) != len(ids):
        raise InvalidArgumentError(f"expected none or {len(ids)} numbers, got {len(given)}", field=field)
    for each in given:
        if not least <= each <= most:
            raise InvalidArgumentError(f"expected numbers from {least:g} to {most:g}, got {each:g}", field=field)
    return tuple(given)


def _sums(given: Sequence[parameters_pb2.DecidedSum], ids: Sequence[bytes], field: str) -> tuple[DecidedSum, ...]:
    """Reads the sums in a round."""
    found = [DecidedSum(each.index, each.num_updates, each.discount) for each in given]
    least = 0
    for number, (place, num_updates, discount) in enumerate(found):
        if not least <= place < len(ids):
            raise InvalidArgumentError(
                f"expected ascending places below {len(ids)}, got {place}", field=f"{field}[{number}].index"
            )
        if not 1 <= num_updates <= MAX_SUMMANDS:
            raise InvalidArgumentError(
                f"expected 1 to {MAX_SUMMANDS} updates, got {num_updates}", field=f"{field}[{number}].num_updates"
            )
        if not 0 < discount <= 1:
            raise InvalidArgumentError(
                f"expected a discount above 0 and at most 1, got {discount:g}", field=f"{field}[{number}].discount"
            )
        least = place + 1
    return tuple(found)


def _measurements(request: UpdateRequest, spec: ParametersSpec) -> tuple[Measurement, ...]:
    """Reads what other servers have measured of an update.

    Raises:
        InvalidArgumentError: There is nothing to measure; or there are none, or they are no measurements.
        AbortedError: One of the other servers does not hold the update any more.
    """
    expected = spec.others if spec.measures_norms else frozenset()
    if bool(request.measured) is not bool(expected):
        raise InvalidArgumentError(
            f"expected measurements by {len(expected)} other servers, got {len(request.measured)}", field="measured"
        )
    found: dict[int, Measurement] = {}
    for index, each in enumerate(request.measured):
        field, distances = f"measured[{index}]", each.squared_distances
        check_count(distances, _MOST_DECIDED, "updates", f"{field}.squared_distances")
        check_ids([other.part_id for other in distances], f"{field}.squared_distances")
        for terms in (each.squared_norm, *[other.terms for other in distances]):
            if len(terms) > _MOST_TERMS or any(map(math.isnan, terms)):
                raise InvalidArgumentError(
                    f"expected at most {_MOST_TERMS} terms, and none that is NaN, got {list(terms[:3])}",
                    field=field,
                )
        by_id = {other.part_id.hex(): tuple(other.terms) for other in distances if other.terms}
        found[each.server] = Measurement(each.server, tuple(each.squared_norm), by_id)
    if found.keys() != expected:
        raise InvalidArgumentError(
            f"expected one measurement by each of servers {sorted(expected)}, got those of {sorted(found)}",
            field="measured",
        )
    if not all(each.squared_norm for each in found.values()):
        raise AbortedError("a server does not hold the update any more: stage it again", field="update")
    return tuple([found[server] for server in sorted(found)])


def names_in(given: IncomingGradient, components: Sequence[ComponentSpec]) -> list[str]:
    """Returns the names of an update's components, in the order of the request.

    Args:
        given: The update.
        components: All components of the parameters. The only one may be without its name in the update.
    """
    names = [each.name for each in given.components]
    return [components[0].name] if len(components) == 1 and names == [""] else names
