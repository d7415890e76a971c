"""The reductions, as the creator of parameters chooses them."""

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import listed
from gradserve_server.parameters.round_rules import RoundRules
from gradserve_server.storage.journal import Record, record_of, value_of

MOST_ITERATIONS = 10_000


class Reduction:
    """A reduction: a value that says how the updates of a round become one."""

    __slots__ = ()
    report_only: bool = False
    """True if the mean is used, and the updates that the reduction would have dropped are only reported."""

    @property
    def name(self) -> str:
        """The name of the reduction, as in the protos."""
        return _NAMES[type(self)]

    @property
    def holds_updates(self) -> bool:
        """True if updates are held until their round ends, rather than summed as they arrive."""
        return not isinstance(self, Mean | Sum)

    @property
    def needs_all_components(self) -> bool:
        """True if every update needs all components."""
        return isinstance(self, Krum | GeometricMedian)

    def check_options(self, *, by_count: bool, clip_norm: float | None) -> None:
        """Checks the options of a spec that concern the reduction.

        Args:
            by_count: Whether a mean is divided by the number of updates rather than by their weights.
            clip_norm: The greatest norm of an update; None for no limit.

        Raises:
            InvalidArgumentError: clip_norm is not positive and finite, or there is no mean that could be divided.
        """
        if clip_norm is not None and not (0 < clip_norm < float("inf")):
            raise InvalidArgumentError(
                f"expected a positive, finite clip_norm, got {clip_norm:g}", field="spec.clip_norm"
            )
        if by_count and not (isinstance(self, Mean) or self.report_only):
            raise InvalidArgumentError(
                f"expected normalization by weights with {self.name}, got COUNT: it is the divisor of a mean",
                field="spec.normalization",
            )

    def check_rounds(self, rules: RoundRules) -> None:
        """Checks that rounds that end by `rules` have enough updates.

        Raises:
            InvalidArgumentError: Krum would not be safe in the smallest of them, or select updates it does not trust.
        """

    def check_update(self, names: Collection[str], all_names: Collection[str], field: str = "update") -> None:
        """Checks the components of an update.

        Args:
            names: The names of its components.
            all_names: The names of all components, in order.
            field: The field of the error.

        Raises:
            InvalidArgumentError: A component is missing, and the reduction needs all.
        """
        if self.needs_all_components and (missing := [each for each in all_names if each not in names]):
            raise InvalidArgumentError(
                f"expected all {len(all_names)} components in each update for reduction {self.name}, which compares "
                f"distances, got an update without {listed(missing)}: send zeros for what has not changed",
                field=field,
            )


@dataclass(frozen=True, slots=True)
class Mean(Reduction):
    """The weighted mean."""


@dataclass(frozen=True, slots=True)
class Sum(Reduction):
    """The weighted sum."""


@dataclass(frozen=True, slots=True)
class Median(Reduction):
    """The median of each element; of an even number, the mean of the two in the middle. Weights do not count."""

    def kept(self, count: int) -> range:
        """Returns the places of the values whose mean is the result, of `count` in rising order."""
        first = (count - 1) // 2
        return range(first, count - first)


@dataclass(frozen=True, slots=True)
class Maximum(Reduction):
    """The greatest value of each element. Weights do not count."""

    def kept(self, count: int) -> range:
        """Returns the place of the result, of `count` values in rising order."""
        return range(count - 1, count)


@dataclass(frozen=True, slots=True)
class TrimmedMean(Reduction):
    """The mean of each element without the smallest and the greatest values. Weights do not count.

    Attributes:
        fraction: The part of the values that is left out at either end: floor(fraction n) of n.

    Raises:
        InvalidArgumentError: The fraction is less than 0, or 0.5 or more.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not (0 <= self.fraction < 0.5):
            raise InvalidArgumentError(
                f"expected a fraction of at least 0 and less than 0.5, got {self.fraction:g}: as much is left out at "
                "either end",
                field="reduction.trimmed_mean.fraction",
            )

    def kept(self, count: int) -> range:
        """Returns the places of the values whose mean is the result, of `count` in rising order.

        The fraction counts as the decimal number that it is written as: 0.29 of 100 is 29, although 0.29 * 100 in
        float64 is less.
        """
        trimmed = int(Fraction(repr(float(self.fraction))) * count)
        return range(trimmed, count - trimmed)


@dataclass(frozen=True, slots=True)
class Krum(Reduction):
    """The weighted mean of the updates that are closest to their neighbours (Blanchard et al., 2017).

    The score of an update is the sum of its squared distances to its n - num_byzantine - 2 nearest neighbours, at least
    one. Those with the smallest scores are selected; of equal ones, the first. Every update needs all components.

    Attributes:
        num_byzantine: The number of updates f that may be arbitrarily wrong. Only a round of at least 2 f + 3 updates
            is safe from them; a smaller one has the median of each element instead.
        num_selected: The number of updates that are selected; 1 is Krum, more is Multi-Krum.
        report_only: Whether to use the mean, and only report the updates that Krum would not have selected.

    Raises:
        InvalidArgumentError: num_byzantine is negative, or num_selected is not positive.
    """

    num_byzantine: int
    num_selected: int = 1
    report_only: bool = False

    def __post_init__(self) -> None:
        if self.num_byzantine < 0:
            raise InvalidArgumentError(
                f"expected num_byzantine of at least 0, got {self.num_byzantine}", field="reduction.krum.num_byzantine"
            )
        if self.num_selected < 1:
            raise InvalidArgumentError(
                f"expected num_selected of at least 1, got {self.num_selected}", field="reduction.krum.num_selected"
            )

    @property
    def num_needed(self) -> int:
        """The number of updates of which a round is safe."""
        return 2 * self.num_byzantine + 3

    def check_rounds(self, rules: RoundRules) -> None:
        least = rules.least_required
        name = "num_required" if rules.min_required is None else "min_required"
        if least < self.num_needed:
            wrong = "one wrong update" if self.num_byzantine == 1 else f"{self.num_byzantine} wrong updates"
            raise InvalidArgumentError(
                f"expected rounds of at least 2 num_byzantine + 3 = {self.num_needed} updates for krum with "
                f"num_byzantine={self.num_byzantine}, got {name}={least}: in smaller ones, {wrong} can choose the "
                "result",
                field="spec.reduction.krum.num_byzantine",
            )
        if self.num_selected > least - self.num_byzantine:
            raise InvalidArgumentError(
                f"expected num_selected of at most {name} - num_byzantine = {least - self.num_byzantine}, got "
                f"{self.num_selected}: it would select updates that it does not trust",
                field="spec.reduction.krum.num_selected",
            )


@dataclass(frozen=True, slots=True)
class GeometricMedian(Reduction):
    """The point with the smallest weighted sum of distances to all updates. Every update needs all components.

    Attributes:
        max_iterations: The most steps of Weiszfeld's iteration.
        tolerance: The iteration ends when the point moves by less than this part of its norm.

    Raises:
        InvalidArgumentError: max_iterations is not from 1 to 10,000, or the tolerance is not from 0 to less than 1.
    """

    max_iterations: int = 100
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not (1 <= self.max_iterations <= MOST_ITERATIONS):
            raise InvalidArgumentError(
                f"expected max_iterations from 1 to {MOST_ITERATIONS}, got {self.max_iterations}",
                field="reduction.geometric_median.max_iterations",
            )
        if not (0 <= self.tolerance < 1):
            raise InvalidArgumentError(
                f"expected a tolerance of at least 0 and less than 1, got {self.tolerance:g}",
                field="reduction.geometric_median.tolerance",
            )


_KINDS: dict[str, type[Reduction]] = {
    "mean": Mean,
    "sum": Sum,
    "median": Median,
    "maximum": Maximum,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "geometric_median": GeometricMedian,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def reduction_record(reduction: Reduction) -> Record:
    """Converts a reduction to a record; the reverse of `reduction_of`."""
    return {"name": reduction.name, **record_of(reduction, {})}


def reduction_of(record: Record) -> Reduction:
    """Converts a record to a reduction.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    numbers = dict(record)
    return value_of(_KINDS[numbers.pop("name")], numbers, {})
