"""The rules of rounds of parameters: when one ends, and how much updates count that are stale."""

from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.storage.journal import Record, record_of, value_of

LONGEST_SECONDS = 315_576_000_000.0
"""The longest duration of a rule: 10,000 years, the most that protobuf has."""
SHORTEST_DEADLINE = 0.001
"""The shortest deadline: many clocks could not tell much shorter ones from none."""
DEFAULT_MAX_GRACE = 60.0


@dataclass(frozen=True, slots=True)
class RoundRules:
    """The rules for the end of a round. All durations are in seconds.

    Attributes:
        num_required: The number of updates that are enough.
        min_required: The number of updates with which a round ends at its deadline; None for num_required.
        expected: The number of updates after which nobody is waited for; or "alive", for an update of each worker that
            was in one of the last two rounds and whose client is still there; None to let `grace` pass in full.
        grace: The time for latecomers, from the moment at which num_required updates are in; "adaptive" to derive it
            from earlier rounds, see `Closer`.
        max_grace: The longest adaptive grace.
        min_interval: The shortest time between the ends of two rounds.
        deadline: The longest time from the first update of a round to its end; None for no limit.

    Raises:
        InvalidArgumentError: A value is out of its range, or has no effect beside the others.
    """

    num_required: int
    min_required: int | None = None
    expected: int | Literal["alive"] | None = None
    grace: float | Literal["adaptive"] = 0.0
    max_grace: float = DEFAULT_MAX_GRACE
    min_interval: float = 0.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.num_required < 1:
            raise InvalidArgumentError(
                f"expected num_required of at least 1, got {self.num_required}", field="rounds.num_required"
            )
        if self.grace != "adaptive":
            _check_duration("grace", self.grace)
        _check_duration("max_grace", self.max_grace)
        _check_duration("min_interval", self.min_interval)
        if self.deadline is not None:
            _check_duration("deadline", self.deadline)
        self._check_min_required()
        self._check_grace()
        self._check_deadline()

    def _check_min_required(self) -> None:
        if self.min_required is None:
            return
        if not (1 <= self.min_required <= self.num_required):
            raise InvalidArgumentError(
                f"expected min_required from 1 to num_required, which is {self.num_required}, got {self.min_required}",
                field="rounds.min_required",
            )
        if self.deadline is None:
            raise InvalidArgumentError(
                f"expected a deadline with min_required, got min_required={self.min_required} and no deadline: a round "
                "ends with fewer than num_required updates only at its deadline",
                field="rounds.min_required",
            )

    def _check_grace(self) -> None:
        if self.grace != "adaptive" and self.max_grace != DEFAULT_MAX_GRACE:
            raise InvalidArgumentError(
                f"expected max_grace only with grace='adaptive', got {self.max_grace:g} with a grace of "
                f"{self.grace:g} s, which is fixed",
                field="rounds.max_grace",
            )
        if self.grace == "adaptive" and not self.max_grace:
            raise InvalidArgumentError(
                "expected a positive max_grace with grace='adaptive', got 0: for no grace, set grace to 0",
                field="rounds.max_grace",
            )
        if self.expected is None:
            return
        if self.expected != "alive" and self.expected < self.num_required:
            raise InvalidArgumentError(
                f"expected at least num_required, which is {self.num_required}, for the number of expected updates, "
                f"got {self.expected}",
                field="rounds.expected",
            )
        if not self.grace:
            raise InvalidArgumentError(
                f"expected a positive or adaptive grace with expected={self.expected!r}, got 0: without a grace, a "
                "round ends with num_required updates, whoever else is expected",
                field="rounds.expected",
            )

    def _check_deadline(self) -> None:
        if self.deadline is None:
            return
        if self.deadline < SHORTEST_DEADLINE:
            raise InvalidArgumentError(
                f"expected a deadline of at least {SHORTEST_DEADLINE:g} s, got {self.deadline:g} s: rounds would be "
                "overdue at their first update",
                field="rounds.deadline",
            )
        for name, least in (("grace", self.grace), ("min_interval", self.min_interval)):
            if least != "adaptive" and self.deadline < least:
                raise InvalidArgumentError(
                    f"expected a deadline of at least {name}, which is {least:g} s, got {self.deadline:g} s: it would "
                    f"end rounds before {name} has passed",
                    field="rounds.deadline",
                )

    @property
    def least_required(self) -> int:
        """The number of updates without which no round ends."""
        return self.num_required if self.min_required is None else self.min_required


def _check_duration(name: str, seconds: float) -> None:
    if not (0 <= seconds <= LONGEST_SECONDS):
        raise InvalidArgumentError(
            f"expected a {name} from 0 to {LONGEST_SECONDS:.0f} seconds (10,000 years), got {seconds:g}",
            field=f"rounds.{name}",
        )


def rules_record(rules: RoundRules) -> Record:
    """Converts rules to a record; the reverse of `rules_of`."""
    return record_of(rules, {})


def rules_of(record: Record) -> RoundRules:
    """Converts a record to rules.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    return value_of(RoundRules, record, {})


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
