"""The properties of parameters: as arguments of `Client.parameters`, as messages, and in descriptions."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from google.protobuf.duration_pb2 import Duration

from gradserve.calls.accumulators.components import Component
from gradserve.calls.accumulators.creation import component_message
from gradserve.calls.arguments import as_durability
from gradserve.conversion.plain import INT32, INT64, as_choice, as_flag, as_integer, as_number, as_texts
from gradserve.optim import SGD, Optimizer, Schedule, constant
from gradserve.optim.messages import optimizer_message, optimizer_of, schedule_message, schedule_of
from gradserve.parameter_records import (
    Evaluation,
    ParametersInfo,
    Refusal,
    RoundRecord,
    RoundRules,
    RoundUpdate,
    Unchanged,
    WeightLedger,
)
from gradserve.reductions import Reduction, as_reduction, reduction_message, reduction_of
from gradserve.results import DenseSpec
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.messages import decode_duration, encode_duration
from gradserve_protocol.tensors import to_dtype
from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2

_LONGEST_SECONDS = 315_576_000_000
"""10,000 years, the most that a Duration can hold."""
_NATURAL = range(1, INT64.stop)
_UPDATES = {"delta": parameters_pb2.UPDATE_KIND_DELTA, "gradient": parameters_pb2.UPDATE_KIND_GRADIENT}
_NORMALIZATIONS = {
    "weights": parameters_pb2.NORMALIZATION_WEIGHTS,
    "count": parameters_pb2.NORMALIZATION_COUNT,
}
_DURABILITIES = {
    accumulator_pb2.DURABILITY_NONE: "none",
    accumulator_pb2.DURABILITY_ROUND: "round",
    accumulator_pb2.DURABILITY_GRADIENT: "gradient",
}
_OPTIMIZER, _SCHEDULE = Argument("optimizer"), Argument("schedule")
_DISCOUNT = re.compile(r"(polynomial|exponential)\(([^()]*)\)")
_STALENESS = "'constant', 'inverse_sqrt', 'polynomial(A)' or 'exponential(G)'"
_DEFAULT_KEPT_VERSIONS, _DEFAULT_KEPT_ROUNDS = 2, 1000
_DEFAULT_RULES = RoundRules()


@dataclass(frozen=True)
class ParametersOptions:
    """The properties of new parameters; see `Client.parameters`."""

    optimizer: Optimizer | None = None
    update: str = "delta"
    rules: RoundRules = _DEFAULT_RULES
    max_staleness: int = 0
    staleness: str = "constant"
    normalize: str = "weights"
    reduction: Reduction | str = "mean"
    clip_norm: float | None = None
    schedule: Schedule | None = None
    keep_versions: int = _DEFAULT_KEPT_VERSIONS
    keep_rounds: int = _DEFAULT_KEPT_ROUNDS
    deterministic: bool = False
    refuse_non_finite: bool = True
    one_per_worker: bool = True
    durability: str | None = None
    agreement: Mapping[str, str] | None = None
    sharded: bool = False


def given_names(options: ParametersOptions) -> list[str]:
    """Returns the names of the properties that are not those of `ParametersOptions()`, as arguments."""
    given, plain = (vars(each.rules) | {**vars(each), "rules": None} for each in (options, ParametersOptions()))
    return [name for name, value in given.items() if value is not plain[name] and value != plain[name]]


def spec_of(options: ParametersOptions, components: Iterable[Component]) -> parameters_pb2.ParametersSpec:
    """Returns the message with the properties of new parameters.

    Raises:
        InvalidArgumentError: One is not valid; it is named.
    """
    update = as_choice(options.update, tuple(_UPDATES), Argument("update"))
    if options.optimizer is None and update == "gradient":
        raise InvalidArgumentError(
            "expected an optimizer for gradients, such as gradserve.optim.SGD(0.01), got None", field="optimizer"
        )
    spec = parameters_pb2.ParametersSpec(
        components=map(component_message, components),
        update=_UPDATES[update],
        optimizer=optimizer_message(SGD(1.0) if options.optimizer is None else options.optimizer, _OPTIMIZER),
        rounds=rules_message(options.rules),
        staleness=_staleness_message(options.max_staleness, options.staleness),
        normalization=_NORMALIZATIONS[as_choice(options.normalize, tuple(_NORMALIZATIONS), Argument("normalize"))],
        reduction=reduction_message(as_reduction(options.reduction, Argument("reduction"))),
        keep_versions=as_integer(options.keep_versions, Argument("keep_versions"), range(1, INT32.stop)),
        keep_rounds=as_integer(options.keep_rounds, Argument("keep_rounds"), range(1, INT32.stop)),
        deterministic=as_flag(options.deterministic, Argument("deterministic")),
        accept_non_finite=not as_flag(options.refuse_non_finite, Argument("refuse_non_finite")),
        many_per_worker=not as_flag(options.one_per_worker, Argument("one_per_worker")),
        durability=as_durability(options.durability),
    )
    if options.schedule is not None:
        spec.schedule.CopyFrom(schedule_message(options.schedule, _SCHEDULE))
    if options.clip_norm is not None:
        argument = Argument("clip_norm")
        spec.clip_norm = as_number(options.clip_norm, argument)
        if not 0 < spec.clip_norm < math.inf:
            raise argument.error("a positive number, or None for no limit,", options.clip_norm)
    if options.agreement is not None:
        spec.agreement.update(as_texts(options.agreement, Argument("agreement")))
    return spec


def rules_message(rules: RoundRules) -> parameters_pb2.RoundRules:
    """Returns the message of the rules for the end of a round.

    Raises:
        InvalidArgumentError: One is not valid, or two do not go together.
    """
    required = as_integer(rules.num_required, Argument("num_required"), _NATURAL)
    message = parameters_pb2.RoundRules(num_required=required)
    if rules.min_required is not None:
        argument = Argument("min_required")
        message.min_required = as_integer(rules.min_required, argument, _NATURAL)
        if message.min_required > required:
            raise argument.error(f"at most num_required, {required},", rules.min_required)
        if rules.deadline is None:
            raise argument.error_saying("a deadline, at which so few updates end a round,", "none")
    if isinstance(rules.expected, str):
        if rules.expected != "alive":
            raise Argument("expected").error("a number of updates, 'alive' or None", rules.expected)
        message.expected_alive = True
    elif rules.expected is not None:
        argument = Argument("expected")
        message.expected_count = as_integer(rules.expected, argument, _NATURAL)
        if message.expected_count < required:
            raise argument.error(f"at least num_required, {required},", rules.expected)
    if isinstance(rules.grace, str):
        if rules.grace != "adaptive":
            raise Argument("grace").error("a number of seconds or 'adaptive'", rules.grace)
        message.adaptive_grace = True
    else:
        message.grace.CopyFrom(_duration(rules.grace, "grace"))
    message.max_grace.CopyFrom(_duration(rules.max_grace, "max_grace"))
    message.min_interval.CopyFrom(_duration(rules.min_interval, "min_interval"))
    if rules.deadline is not None:
        message.deadline.CopyFrom(_duration(rules.deadline, "deadline", is_positive=True))
    return message


def rules_of(message: parameters_pb2.RoundRules) -> RoundRules:
    """Returns the rules in a message."""
    expected: int | Literal["alive"] | None = None
    match message.WhichOneof("expected"):
        case "expected_count":
            expected = message.expected_count
        case "expected_alive" if message.expected_alive:
            expected = "alive"
    grace: float | Literal["adaptive"] = decode_duration(message, "grace") or 0.0
    if message.WhichOneof("grace_kind") == "adaptive_grace" and message.adaptive_grace:
        grace = "adaptive"
    max_grace = decode_duration(message, "max_grace")
    return RoundRules(
        num_required=message.num_required,
        min_required=message.min_required if message.HasField("min_required") else None,
        expected=expected,
        grace=grace,
        max_grace=_DEFAULT_RULES.max_grace if max_grace is None else max_grace,
        min_interval=decode_duration(message, "min_interval") or 0.0,
        deadline=decode_duration(message, "deadline"),
    )


def changed_properties(
    optimizer: Optimizer | Unchanged, schedule: Schedule | Unchanged | None
) -> messages_pb2.ChangeParametersRequest:
    """Returns a request that changes the optimizer and the schedule, without the name of the parameters.

    Raises:
        InvalidArgumentError: The optimizer or the schedule is something else.
    """
    request = messages_pb2.ChangeParametersRequest()
    if not isinstance(optimizer, Unchanged):
        request.optimizer.CopyFrom(optimizer_message(optimizer, _OPTIMIZER))
    if not isinstance(schedule, Unchanged):
        request.schedule.CopyFrom(schedule_message(constant() if schedule is None else schedule, _SCHEDULE))
    return request


def changed_rules(rules: RoundRules, changes: Mapping[str, Any]) -> RoundRules:
    """Returns rules with some of them changed."""
    return replace(rules, **changes)


def update_of(spec: parameters_pb2.ParametersSpec) -> str:
    """Returns the kind of updates of parameters, "delta" or "gradient"."""
    return "gradient" if spec.update == parameters_pb2.UPDATE_KIND_GRADIENT else "delta"


def shapes_of(spec: parameters_pb2.ParametersSpec) -> dict[str, DenseSpec]:
    """Returns the dtype and shape of each component, by name, in the order of the server."""
    return {each.name: DenseSpec(to_dtype(each.dtype), tuple(each.shape.dims)) for each in spec.components}


def info_of(info: parameters_pb2.ParametersInfo) -> ParametersInfo:
    """Returns the description of parameters."""
    spec = info.spec
    return ParametersInfo(
        container=info.parameters.container,
        name=info.parameters.name,
        step=info.step,
        digest=info.digest.hex(),
        num_updates=info.num_updates,
        num_waiting=info.num_waiting,
        num_bytes=info.num_bytes,
        worker_ids=tuple(info.worker_ids),
        kept_steps=tuple(info.kept_steps),
        is_private=info.is_private,
        idle_lease=decode_duration(info, "idle_lease"),
        incarnation=info.parameters.incarnation,
        components=shapes_of(spec),
        update=update_of(spec),
        optimizer=optimizer_of(spec.optimizer),
        schedule=schedule_of(spec.schedule) if spec.HasField("schedule") else None,
        rules=rules_of(spec.rounds),
        max_staleness=spec.staleness.max,
        staleness=_staleness_text(spec.staleness),
        normalize="count" if spec.normalization == parameters_pb2.NORMALIZATION_COUNT else "weights",
        reduction=reduction_of(spec.reduction),
        clip_norm=spec.clip_norm if spec.HasField("clip_norm") else None,
        keep_versions=spec.keep_versions or _DEFAULT_KEPT_VERSIONS,
        keep_rounds=spec.keep_rounds or _DEFAULT_KEPT_ROUNDS,
        deterministic=spec.deterministic,
        refuse_non_finite=not spec.accept_non_finite,
        one_per_worker=not spec.many_per_worker,
        durability=_DURABILITIES.get(spec.durability, "none"),
        agreement=dict(spec.agreement),
        weights=WeightLedger(
            info.weights.accepted, info.weights.applied, info.weights.pending, dict(info.weights.refused)
        ),
        num_shards=spec.num_shards,
    )


def record_of(record: parameters_pb2.RoundRecord) -> RoundRecord:
    """Returns the record of a round."""
    return RoundRecord(
        step=record.step,
        reason=record.reason,
        end_time=record.end_time.ToNanoseconds() / 1e9,
        updates=tuple([_update_of(each) for each in record.updates]),
        refusals=tuple([Refusal(each.worker_id, each.weight, each.reason) for each in record.refusals]),
        digest_before=record.digest_before.hex(),
        digest_after=record.digest_after.hex(),
        lr=record.lr,
        optimizer=optimizer_of(record.optimizer),
        hash=record.hash.hex(),
        metrics=metrics_of(record.metrics),
        evaluation=evaluation_of(record.evaluation) if record.HasField("evaluation") else None,
    )


def _update_of(update: parameters_pb2.RoundUpdate) -> RoundUpdate:
    return RoundUpdate(
        worker_id=update.worker_id,
        weight_asked=update.weight_asked,
        weight=update.weight,
        staleness=update.staleness,
        norm=update.norm if update.HasField("norm") else None,
        cosine=update.cosine if update.HasField("cosine") else None,
        num_bytes=update.num_bytes,
        dropped=update.dropped,
        metrics=metrics_of(update.metrics),
    )


def metrics_of(message: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics in the order of their names."""
    return dict(sorted(message.items()))


def evaluation_of(message: parameters_pb2.Evaluation) -> Evaluation:
    """Returns what was measured of a version."""
    workers = tuple(message.worker_ids)
    return Evaluation(message.step, metrics_of(message.metrics), message.weight, workers, message.num_reports)


def _duration(value: Any, name: str, *, is_positive: bool = False) -> Duration:
    argument = Argument(name)
    seconds = as_number(value, argument)
    if not 0 <= seconds <= _LONGEST_SECONDS or (is_positive and not seconds):
        raise argument.error(f"a {'positive' if is_positive else 'finite'} number of seconds", value)
    return encode_duration(seconds)


def _staleness_message(maximum: Any, discount: Any) -> parameters_pb2.Staleness:
    message = parameters_pb2.Staleness(max=as_integer(maximum, Argument("max_staleness"), range(INT64.stop)))
    argument = Argument("staleness")
    if not isinstance(discount, str):
        raise argument.error(_STALENESS, discount)
    if discount == "constant":
        message.constant.SetInParent()
        return message
    if discount == "inverse_sqrt":
        message.polynomial.exponent = 0.5
        return message
    found = _DISCOUNT.fullmatch(discount)
    if found is None:
        raise argument.error(_STALENESS, discount)
    try:
        number = float(found[2])
    except ValueError:
        raise argument.error(_STALENESS, discount) from None
    if found[1] == "polynomial":
        if not 0 < number < math.inf:
            raise argument.error("a positive exponent", discount)
        message.polynomial.exponent = number
    else:
        if not 0 < number <= 1:
            raise argument.error("a base above 0 and of at most 1", discount)
        message.exponential.base = number
    return message


def _staleness_text(message: parameters_pb2.Staleness) -> str:
    match message.WhichOneof("discount"):
        case "polynomial":
            exponent = message.polynomial.exponent
            return "inverse_sqrt" if exponent == 0.5 else f"polynomial({exponent!r})"
        case "exponential":
            return f"exponential({message.exponential.base!r})"
    return "constant"
