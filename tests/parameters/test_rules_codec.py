"""Rules of parameters as messages: round trips, what unset fields mean, and the paths in errors."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.errors import InvalidArgumentError
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
from gradserve_server.parameters.round_rules import ExponentialDiscount, PolynomialDiscount, RoundRules, Staleness
from gradserve_server.rpc.parameters.rules import (
    decode_reduction,
    decode_rules,
    decode_staleness,
    encode_reduction,
    encode_rules,
    encode_staleness,
)
from tests.together import together


def rounds(text: str) -> parameters_pb2.RoundRules:
    return text_format.Parse(text, parameters_pb2.RoundRules())


def staleness(text: str) -> parameters_pb2.Staleness:
    return text_format.Parse(text, parameters_pb2.Staleness())


def reduction(text: str) -> parameters_pb2.UpdateReduction:
    return text_format.Parse(text, parameters_pb2.UpdateReduction())


def over_the_wire(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


@together(
    "text, expected",
    *zip(
        ("num_required: 3", RoundRules(3)),
        ("num_required: 3 grace { }", RoundRules(3)),
        ("num_required: 3 expected_alive: false adaptive_grace: false", RoundRules(3)),
        ("num_required: 3 max_grace { seconds: 60 }", RoundRules(3)),
        ("num_required: 3 grace { nanos: 500000000 }", RoundRules(3, grace=0.5)),
        ("num_required: 3 adaptive_grace: true", RoundRules(3, grace="adaptive")),
        (
            "num_required: 3 adaptive_grace: true max_grace { seconds: 5 }",
            RoundRules(3, grace="adaptive", max_grace=5.0),
        ),
        ("num_required: 3 grace { seconds: 1 } expected_count: 4", RoundRules(3, grace=1.0, expected=4)),
        ("num_required: 3 grace { seconds: 1 } expected_alive: true", RoundRules(3, grace=1.0, expected="alive")),
        ("num_required: 3 min_interval { seconds: 2 }", RoundRules(3, min_interval=2.0)),
        ("num_required: 3 deadline { seconds: 2 } min_required: 1", RoundRules(3, min_required=1, deadline=2.0)),
        strict=True,
    ),
)
def test_round_rules(text: str, expected: RoundRules) -> None:
    assert decode_rules(rounds(text), "rounds") == expected
    assert decode_rules(over_the_wire(encode_rules(expected)), "rounds") == expected


def test_the_longest_durations() -> None:
    longest = RoundRules(1, grace=315_576_000_000.0, min_interval=1e-9)
    assert decode_rules(over_the_wire(encode_rules(longest)), "rounds") == longest


@together(
    "text, expected",
    *zip(
        ("", Staleness()),
        ("max: 4", Staleness(4)),
        ("max: 4 constant { }", Staleness(4)),
        ("max: 4 polynomial { exponent: 0.5 }", Staleness(4, PolynomialDiscount(0.5))),
        ("max: 4 exponential { base: 0.9 }", Staleness(4, ExponentialDiscount(0.9))),
        strict=True,
    ),
)
def test_staleness(text: str, expected: Staleness) -> None:
    assert decode_staleness(staleness(text), "spec.staleness") == expected
    message = over_the_wire(encode_staleness(expected))
    assert decode_staleness(message, "spec.staleness") == expected
    assert message.WhichOneof("discount") is not None


@together(
    "text, expected",
    *zip(
        ("", Mean()),
        ("mean { }", Mean()),
        ("sum { }", Sum()),
        ("median { }", Median()),
        ("maximum { }", Maximum()),
        ("trimmed_mean { fraction: 0.2 }", TrimmedMean(0.2)),
        ("trimmed_mean { }", TrimmedMean(0.0)),
        ("krum { num_byzantine: 2 num_selected: 3 }", Krum(2, 3)),
        ("krum { num_selected: 1 } report_only: true", Krum(0, report_only=True)),
        ("geometric_median { max_iterations: 9 tolerance: 1e-3 }", GeometricMedian(9, 1e-3)),
        strict=True,
    ),
)
def test_reductions(text: str, expected: Reduction) -> None:
    assert decode_reduction(reduction(text), "spec.reduction") == expected
    message = over_the_wire(encode_reduction(expected))
    assert decode_reduction(message, "spec.reduction") == expected
    assert message.WhichOneof("kind") == expected.name


def test_every_kind_of_reduction_has_its_message() -> None:
    kinds = (Mean(), Sum(), Median(), TrimmedMean(0.1), Krum(1), GeometricMedian(), Maximum())
    oneof = parameters_pb2.UpdateReduction.DESCRIPTOR.oneofs_by_name["kind"]
    assert [kind.name for kind in kinds] == [field.name for field in oneof.fields]


def in_rounds(text: str) -> Callable[[], Any]:
    return lambda: decode_rules(rounds(text), "spec.rounds")


def in_staleness(text: str) -> Callable[[], Any]:
    return lambda: decode_staleness(staleness(text), "spec.staleness")


def in_reduction(text: str) -> Callable[[], Any]:
    return lambda: decode_reduction(reduction(text), "spec.reduction")


@together(
    "decode, field, message",
    *zip(
        (in_rounds(""), "rounds.num_required", "got 0"),
        (in_rounds("num_required: 2 min_required: 0 deadline { seconds: 1 }"), "rounds.min_required", "got 0"),
        (in_rounds("num_required: 2 expected_count: 0"), "rounds.expected_count", "got 0"),
        (in_rounds("num_required: 2 expected_alive: true"), "rounds.expected_alive", "without a grace"),
        (in_rounds("num_required: 2 grace { seconds: -1 }"), "rounds.grace", "got -1"),
        (in_rounds("num_required: 2 grace { seconds: 9223372036854775807 }"), "rounds.grace", "10,000 years"),
        (in_rounds("num_required: 2 max_grace { seconds: 5 }"), "rounds.max_grace", "only with grace='adaptive'"),
        (in_rounds("num_required: 2 min_interval { nanos: -5 }"), "rounds.min_interval", "got -5e-09"),
        (in_rounds("num_required: 2 deadline { }"), "rounds.deadline", "got 0"),
        (in_staleness("max: -1"), "staleness.max", "got -1"),
        (in_staleness("polynomial { exponent: 1 }"), "staleness.max", "at least 1"),
        (in_staleness("max: 1 polynomial { }"), "staleness.polynomial.exponent", "got 0"),
        (in_staleness("max: 1 exponential { base: 2 }"), "staleness.exponential.base", "got 2"),
        (in_reduction("trimmed_mean { fraction: 0.5 }"), "reduction.trimmed_mean.fraction", "got 0.5"),
        (in_reduction("krum { }"), "reduction.krum.num_selected", "got 0"),
        (in_reduction("geometric_median { }"), "reduction.geometric_median.max_iterations", "got 0"),
        (in_reduction("report_only: true"), "reduction.report_only", "with mean, which drops no update"),
        (in_reduction("median { } report_only: true"), "reduction.report_only", "with median, which drops no"),
        strict=True,
    ),
)
def test_errors_name_the_path_of_the_field(decode: Callable[[], Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        decode()
    assert caught.value.field == f"spec.{field}"


def test_a_change_has_its_rules_elsewhere() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_rules(rounds("num_required: -4"), "rounds")
    assert caught.value.field == "rounds.num_required"
