"""The rules and optimizers of parameters in messages; the fields of an optimizer have the names of its settings."""

from dataclasses import fields
from typing import Any, Literal

from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.errors import InvalidArgumentError, request_fields
from gradserve_server.parameters.optimizers import OPTIMIZERS, name_of
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule, ScheduleKind
from gradserve_server.parameters.reductions import (
    GeometricMedian,
    Krum,
    Maximum,
    Mean,
    Median,
    Reduction,
    Sum,
    TrimmedMean,
)
from gradserve_server.parameters.round_rules import (
    DEFAULT_MAX_GRACE,
    ConstantDiscount,
    Discount,
    ExponentialDiscount,
    PolynomialDiscount,
    RoundRules,
    Staleness,
)
from gradserve_server.rpc.boundary.fields import decode_duration


def decode_rules(message: parameters_pb2.RoundRules, field: str) -> RoundRules:
    """Reads the rules for the end of a round.

    Args:
        message: The message.
        field: Its path in the request, for errors.

    Raises:
        InvalidArgumentError: They are not valid.
    """
    expected: int | Literal["alive"] | None = None
    given = message.WhichOneof("expected")
    if given == "expected_count":
        expected = message.expected_count
    elif message.expected_alive:  # false is the same as unset
        expected = "alive"
    grace: float | Literal["adaptive"] = "adaptive" if message.adaptive_grace else 0.0
    if message.HasField("grace"):
        grace = _seconds(message, "grace", 0.0)
    paths = {"rounds.expected": f"{field}.{given}", "rounds": field}
    with request_fields(paths):
        return RoundRules(
            num_required=message.num_required,
            min_required=message.min_required if message.HasField("min_required") else None,
            expected=expected,
            grace=grace,
            max_grace=_seconds(message, "max_grace", DEFAULT_MAX_GRACE),
            min_interval=_seconds(message, "min_interval", 0.0),
            deadline=decode_duration(message, "deadline"),
        )


def _seconds(message: parameters_pb2.RoundRules, name: str, default: float) -> float:
    seconds = decode_duration(message, name)
    return default if seconds is None else seconds


def encode_rules(rules: RoundRules) -> parameters_pb2.RoundRules:
    """Returns the message of rules; `max_grace` is set with an adaptive grace only."""
    message = parameters_pb2.RoundRules(num_required=rules.num_required)
    if rules.min_required is not None:
        message.min_required = rules.min_required
    if rules.expected == "alive":
        message.expected_alive = True
    elif rules.expected is not None:
        message.expected_count = rules.expected
    if rules.grace == "adaptive":
        message.adaptive_grace = True
        message.max_grace.CopyFrom(encode_duration(rules.max_grace))
    elif rules.grace:
        message.grace.CopyFrom(encode_duration(rules.grace))
    if rules.min_interval:
        message.min_interval.CopyFrom(encode_duration(rules.min_interval))
    if rules.deadline is not None:
        message.deadline.CopyFrom(encode_duration(rules.deadline))
    return message


def decode_staleness(message: parameters_pb2.Staleness, field: str) -> Staleness:
    """Reads the greatest staleness and the discount.

    Args:
        message: The message.
        field: Its path in the request, for errors.

    Raises:
        InvalidArgumentError: They are not valid.
    """
    given = message.WhichOneof("discount")
    with request_fields({"staleness.discount": f"{field}.{given}", "staleness": field}):
        discount: Discount = ConstantDiscount()
        if given == "polynomial":
            discount = PolynomialDiscount(message.polynomial.exponent)
        elif given == "exponential":
            discount = ExponentialDiscount(message.exponential.base)
        return Staleness(message.max, discount)


def encode_staleness(staleness: Staleness) -> parameters_pb2.Staleness:
    """Returns the message of a staleness, with the discount set."""
    message = parameters_pb2.Staleness(max=staleness.max)
    match staleness.discount:
        case ConstantDiscount():
            message.constant.SetInParent()
        case PolynomialDiscount(exponent):
            message.polynomial.exponent = exponent
        case ExponentialDiscount(base):
            message.exponential.base = base
    return message


def decode_reduction(message: parameters_pb2.UpdateReduction, field: str) -> Reduction:
    """Reads a reduction.

    Args:
        message: The message.
        field: Its path in the request, for errors.

    Raises:
        InvalidArgumentError: It is not valid, or `report_only` is set for one that drops no update.
    """
    if message.report_only and message.WhichOneof("kind") != "krum":
        raise InvalidArgumentError(
            f"expected report_only with krum, got it with {message.WhichOneof('kind') or 'mean'}, which drops no "
            "update: there would be nothing to report",
            field=f"{field}.report_only",
        )
    with request_fields({"reduction": field}):
        match message.WhichOneof("kind"):
            case "sum":
                return Sum()
            case "median":
                return Median()
            case "maximum":
                return Maximum()
            case "trimmed_mean":
                return TrimmedMean(message.trimmed_mean.fraction)
            case "krum":
                return Krum(message.krum.num_byzantine, message.krum.num_selected, message.report_only)
            case "geometric_median":
                median = message.geometric_median
                return GeometricMedian(median.max_iterations, median.tolerance)
            case _:
                return Mean()


def encode_reduction(reduction: Reduction) -> parameters_pb2.UpdateReduction:
    """Returns the message of a reduction, with its kind set."""
    message = parameters_pb2.UpdateReduction(report_only=reduction.report_only)
    getattr(message, reduction.name).SetInParent()  # numbers that are 0 are not on the wire
    match reduction:
        case TrimmedMean():
            message.trimmed_mean.fraction = reduction.fraction
        case Krum():
            message.krum.num_byzantine = reduction.num_byzantine
            message.krum.num_selected = reduction.num_selected
        case GeometricMedian():
            message.geometric_median.max_iterations = reduction.max_iterations
            message.geometric_median.tolerance = reduction.tolerance
    return message


def decode_optimizer(message: parameters_pb2.Optimizer, field: str = "optimizer") -> Optimizer:
    """Reads an optimizer.

    Args:
        message: The message.
        field: Its path in the request, with which the fields of errors begin: "optimizer.sgd.lr".

    Raises:
        InvalidArgumentError: It is unset or unknown, or a setting is out of its range.
    """
    name = message.WhichOneof("kind")
    if name is None:
        raise InvalidArgumentError(f"expected one of {', '.join(OPTIMIZERS)}, got none", field=field)
    kind, settings = OPTIMIZERS[name], getattr(message, name)
    with request_fields({"optimizer": f"{field}.{name}"}):
        return kind(**{each.name: getattr(settings, each.name) for each in fields(kind)})


def encode_optimizer(optimizer: Optimizer) -> parameters_pb2.Optimizer:
    """Writes an optimizer."""
    message = parameters_pb2.Optimizer()
    settings = getattr(message, name_of(optimizer))
    settings.SetInParent()  # it may have no other number than 0
    for name, value in vars(optimizer).items():
        setattr(settings, name, value)
    return message


def decode_schedule(message: parameters_pb2.Schedule, field: str = "schedule") -> Schedule:
    """Reads a schedule; one without a kind is constant after its warm-up.

    Args:
        message: The message.
        field: Its path in the request, with which the fields of errors begin: "schedule.cosine.rounds".

    Raises:
        InvalidArgumentError: A value is out of its range.
    """
    name = message.WhichOneof("kind") or ScheduleKind.CONSTANT.value
    kind, values = ScheduleKind(name), getattr(message, name)
    course: dict[str, Any] = {}
    if kind is not ScheduleKind.CONSTANT:
        course = {"rounds": values.rounds, "end": values.end}
    paths = {f"schedule.{each}": f"{field}.{name}.{each}" for each in course}
    with request_fields({**paths, "schedule": field}):
        return Schedule(kind, message.warmup, **course)


def encode_schedule(schedule: Schedule) -> parameters_pb2.Schedule:
    """Writes a schedule."""
    message = parameters_pb2.Schedule(warmup=schedule.warmup)
    values = getattr(message, schedule.kind.value)
    values.SetInParent()
    if schedule.kind is not ScheduleKind.CONSTANT:
        values.rounds, values.end = schedule.rounds, schedule.end
    return message
