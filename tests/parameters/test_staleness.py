"""The factors of stale updates: exact, and the same on every processor."""

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.round_rules import (
    INVERSE_SQRT,
    ConstantDiscount,
    Discount,
    ExponentialDiscount,
    PolynomialDiscount,
    Staleness,
    staleness_of,
    staleness_record,
)
from tests.together import together


def ulps(value: float, reference: float) -> float:
    return abs(value - reference) / math.ulp(reference)


DISCOUNTS = (
    ConstantDiscount(),
    INVERSE_SQRT,
    PolynomialDiscount(1.0),
    PolynomialDiscount(0.3),
    ExponentialDiscount(0.9),
)


@pytest.mark.parametrize("discount", DISCOUNTS, ids=str)
def test_fresh_updates_have_the_factor_one(discount: Discount) -> None:
    assert Staleness(3, discount).factor(0) == 1.0


@given(st.integers(0, 1000))
def test_constant(staleness: int) -> None:
    assert Staleness(1000).factor(staleness) == 1.0


@given(st.integers(0, 1000), st.floats(0.01, 6.0))
def test_polynomial(staleness: int, exponent: float) -> None:
    factor = Staleness(1000, PolynomialDiscount(exponent)).factor(staleness)
    assert ulps(factor, math.pow(1.0 + staleness, -exponent)) <= 1


@given(st.integers(0, 1000), st.floats(0.96, 1.0))
def test_exponential(staleness: int, base: float) -> None:
    factor = Staleness(1000, ExponentialDiscount(base)).factor(staleness)
    assert ulps(factor, math.pow(base, staleness)) <= 1
    assert factor == float(Fraction(base) ** staleness), "the nearest float64"


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_whole_exponents_are_exact(staleness: int, exponent: int) -> None:
    factor = Staleness(10**6, PolynomialDiscount(float(exponent))).factor(staleness)
    assert factor == float(Fraction(1, (1 + staleness) ** exponent))


@given(st.integers(0, 10**6))
def test_inverse_sqrt_is_exact(staleness: int) -> None:
    factor = Staleness(10**6, INVERSE_SQRT).factor(staleness)
    assert ulps(factor, 1 / np.sqrt(1.0 + staleness)) <= 1
    # Both neighbours are further from the root of 1 / (1 + s), whose distance is told by squares.
    exact = Fraction(1, 1 + staleness)
    for neighbour in (math.nextafter(factor, 0.0), math.nextafter(factor, 2.0)):
        middle = (Fraction(factor) + Fraction(neighbour)) / 2
        assert (middle**2 > exact) == (neighbour > factor) or middle**2 == exact


@together(
    "discount, staleness, expected",
    *zip(
        (INVERSE_SQRT, 2, "0x1.279a74590331cp-1"),
        (INVERSE_SQRT, 6, "0x1.83091e6a7f7e7p-2"),
        (PolynomialDiscount(0.3), 4, "0x1.3bebdcc9d061ap-1"),
        (ExponentialDiscount(0.9), 7, "0x1.e9c6a99d1cdbfp-2"),
        strict=True,
    ),
)
def test_the_bits_are_the_same_everywhere(discount: Discount, staleness: int, expected: str) -> None:
    """The expected bits are mpmath's: float(mpmath.power(mpf(1 + s), mpf(-exponent))) with mp.dps = 60."""
    assert Staleness(10, discount).factor(staleness).hex() == expected


def test_updates_that_are_too_stale() -> None:
    staleness = Staleness(2, INVERSE_SQRT)
    assert [staleness.is_stale(s) for s in (0, 1, 2, 3)] == [False, False, False, True]
    for s in (-1, 3):
        with pytest.raises(ValueError, match=f"from 0 to 2, got {s}"):
            staleness.factor(s)


@together(
    "make, field, message",
    *zip(
        (lambda: Staleness(-1), "max", "at least 0, got -1"),
        (lambda: Staleness(0, INVERSE_SQRT), "max", "only fresh updates count"),
        (lambda: Staleness(0, ExponentialDiscount(0.5)), "max", "at least 1"),
        (lambda: PolynomialDiscount(0.0), "discount.exponent", "got 0"),
        (lambda: PolynomialDiscount(-1.0), "discount.exponent", "got -1"),
        (lambda: PolynomialDiscount(math.inf), "discount.exponent", "got inf"),
        (lambda: PolynomialDiscount(math.nan), "discount.exponent", "got nan"),
        (lambda: ExponentialDiscount(0.0), "discount.base", "got 0"),
        (lambda: ExponentialDiscount(1.5), "discount.base", "got 1.5"),
        (lambda: ExponentialDiscount(math.nan), "discount.base", "got nan"),
        (lambda: Staleness(65, ExponentialDiscount(0.5)), "max", "got 65, where it is 2.7e-20"),
        (lambda: Staleness(1, PolynomialDiscount(1e300)), "max", "where it is 0"),
        (lambda: Staleness(2**63 - 1, ExponentialDiscount(0.999)), "max", "where it is 0"),
        strict=True,
    ),
)
def test_what_makes_no_sense(make: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        make()
    assert caught.value.field == f"staleness.{field}"


@together(
    "staleness",
    [
        Staleness(),
        Staleness(64, ExponentialDiscount(0.5)),
        Staleness(2**63 - 1, ExponentialDiscount(1.0)),
        Staleness(2**63 - 1, PolynomialDiscount(1.0)),
        *(Staleness(7, discount) for discount in DISCOUNTS),
    ],
)
def test_records(staleness: Staleness) -> None:
    assert staleness_of(json.loads(json.dumps(staleness_record(staleness)))) == staleness


@together("record", [{}, {"max": 1}, {"max": 1, "discount": ["cubic"]}, {"max": 1, "discount": ["polynomial"]}])
def test_damaged_records(record: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError)):
        staleness_of(record)
