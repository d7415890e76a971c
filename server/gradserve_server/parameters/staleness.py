"""The discount of updates that were computed from an older version than the newest."""

from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, TypeAlias

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.storage.journal import Record

LEAST_FACTOR = 2.0**-64
"""The least factor: an update of weight 1 would not count with less, see `accumulators.incoming`."""

_DECIMAL = Context(prec=50, Emin=-999_999, Emax=999_999, traps=[])


@dataclass(frozen=True, slots=True)
class ConstantDiscount:
    """No discount: the factor is 1."""


@dataclass(frozen=True, slots=True)
class PolynomialDiscount:
    """The factor (1 + s)^-exponent.

    Attributes:
        exponent: The exponent. 0.5 is the inverse square root of 1 + s.

    Raises:
        InvalidArgumentError: The exponent is not positive and finite.
    """

    exponent: float

    def __post_init__(self) -> None:
        if not (0 < self.exponent < float("inf")):
            raise InvalidArgumentError(
                f"expected a positive, finite exponent, got {self.exponent:g}", field="staleness.discount.exponent"
            )


@dataclass(frozen=True, slots=True)
class ExponentialDiscount:
    """The factor base^s.

    Attributes:
        base: The base.

    Raises:
        InvalidArgumentError: The base is not above 0, or above 1.
    """

    base: float

    def __post_init__(self) -> None:
        if not (0 < self.base <= 1):
            raise InvalidArgumentError(
                f"expected a base above 0 and at most 1, got {self.base:g}", field="staleness.discount.base"
            )


Discount: TypeAlias = ConstantDiscount | PolynomialDiscount | ExponentialDiscount

INVERSE_SQRT = PolynomialDiscount(0.5)


@dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness that updates may have, and the factor of their weights.

    The staleness s of an update is the number of versions that were made since the one from which it was computed.

    Attributes:
        max: The greatest s; updates with a greater one are dropped.
        discount: The rule for the factor. A fresh update has the factor 1.

    Raises:
        InvalidArgumentError: `max` is negative, the discount has no effect, or the factor becomes less than 2^-64.
    """

    max: int = 0
    discount: Discount = ConstantDiscount()

    def __post_init__(self) -> None:
        if self.max < 0:
            raise InvalidArgumentError(f"expected max of at least 0, got {self.max}", field="staleness.max")
        if isinstance(self.discount, ConstantDiscount):
            return
        if not self.max:
            raise InvalidArgumentError(
                f"expected max of at least 1 with {self.discount}, got 0: only fresh updates count then",
                field="staleness.max",
            )
        least = _factor(self.discount, self.max)
        if least < LEAST_FACTOR:
            raise InvalidArgumentError(
                f"expected a max at which the factor of {self.discount} is at least 2^-64 ({LEAST_FACTOR:.2g}), got "
                f"{self.max}, where it is {least:.2g}: an update that is so stale could not count",
                field="staleness.max",
            )

    def __str__(self) -> str:
        """Returns the properties as users of a client know them."""
        name, *numbers = staleness_record(self)["discount"]
        arguments = f"({', '.join(map(repr, numbers))})" if numbers else ""
        return f"{name}{arguments} up to {self.max}"

    def is_stale(self, staleness: int) -> bool:
        """Returns True if an update with this staleness is dropped."""
        return staleness > self.max

    def factor(self, staleness: int) -> float:
        """Returns the factor for an update with this staleness: the nearest float64, on every processor.

        Raises:
            ValueError: The staleness is negative, or an update with it is dropped.
        """
        if not (0 <= staleness <= self.max):
            raise ValueError(f"expected a staleness from 0 to {self.max}, got {staleness}")
        return _factor(self.discount, staleness)


@lru_cache(maxsize=4096)
def _factor(discount: Discount, staleness: int) -> float:
    """Computes with 50 decimal digits, as the last bit of a power in C depends on the library and the processor."""
    if isinstance(discount, ConstantDiscount) or not staleness:
        return 1.0
    if isinstance(discount, PolynomialDiscount):
        return float(_DECIMAL.power(Decimal(1 + staleness), -Decimal(discount.exponent)))
    return float(_DECIMAL.power(Decimal(discount.base), staleness))


def staleness_record(staleness: Staleness) -> Record:
    """Converts a staleness to a record; the reverse of `staleness_of`."""
    discount: list[Any]
    match staleness.discount:
        case ConstantDiscount():
            discount = ["constant"]
        case PolynomialDiscount(exponent):
            discount = ["polynomial", exponent]
        case ExponentialDiscount(base):
            discount = ["exponential", base]
    return {"max": staleness.max, "discount": discount}


_DISCOUNTS = {"constant": ConstantDiscount, "polynomial": PolynomialDiscount, "exponential": ExponentialDiscount}


def staleness_of(record: Record) -> Staleness:
    """Converts a record to a staleness.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    name, *numbers = record["discount"]
    return Staleness(record["max"], _DISCOUNTS[name](*numbers))
