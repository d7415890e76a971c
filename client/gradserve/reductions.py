"""Reductions: how the updates of a round become one.

client.parameters(values, ..., reduction=gradserve.reductions.trimmed_mean(0.1))

All but `mean` and `sum` hold the updates in the server's memory until their round ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradserve.conversion.plain import INT64, as_flag, as_integer, as_number
from gradserve.public_names import publish as _publish
from gradserve_protocol.argument import Argument
from gradserve_protocol.v1 import parameters_pb2

__all__ = [
    "GeometricMedian",
    "Krum",
    "Maximum",
    "Mean",
    "Median",
    "Reduction",
    "Sum",
    "TrimmedMean",
    "geometric_median",
    "krum",
    "maximum",
    "mean",
    "median",
    "multi_krum",
    "sum",
    "trimmed_mean",
]
_NATURAL = range(1, INT64.stop)


@dataclass(frozen=True)
class Reduction:
    """A way to reduce the updates of a round."""

    _kind = ""
    """The field of its message."""

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)

    def _checked(self) -> Mapping[str, object]:
        """Returns the settings as the numbers that are sent."""
        return {}


@dataclass(frozen=True)
class Mean(Reduction):
    """The weighted mean."""

    _kind = "mean"


@dataclass(frozen=True)
class Sum(Reduction):
    """The weighted sum."""

    _kind = "sum"


@dataclass(frozen=True)
class Median(Reduction):
    """The median of each element. Weights do not count."""

    _kind = "median"


@dataclass(frozen=True)
class Maximum(Reduction):
    """The greatest value of each element. Weights do not count."""

    _kind = "maximum"


@dataclass(frozen=True)
class TrimmedMean(Reduction):
    """The mean of each element without its smallest and greatest values. Weights do not count.

    Attributes:
        fraction: The part of the values that is left out at each end: at least 0, less than 0.5.
    """

    fraction: float
    _kind = "trimmed_mean"

    def _checked(self) -> Mapping[str, object]:
        fraction = as_number(self.fraction, Argument("fraction"))
        if not 0 <= fraction < 0.5:
            raise Argument("fraction").error("a number of at least 0 and less than 0.5", self.fraction)
        return {"fraction": fraction}


@dataclass(frozen=True)
class Krum(Reduction):
    """The mean of the updates that are closest to their neighbours; of one it is Krum, of more Multi-Krum.

    Attributes:
        num_byzantine: The number of workers that may send anything.
        num_selected: The number of updates in the mean.
        report_only: Whether to use the mean of all, and only report in the record of the round which updates would have
            been dropped.
    """

    num_byzantine: int
    num_selected: int = 1
    report_only: bool = field(default=False, kw_only=True)
    _kind = "krum"

    def _checked(self) -> Mapping[str, object]:
        return {
            "num_byzantine": as_integer(self.num_byzantine, Argument("num_byzantine"), range(INT64.stop)),
            "num_selected": as_integer(self.num_selected, Argument("num_selected"), _NATURAL),
            "report_only": as_flag(self.report_only, Argument("report_only")),
        }


@dataclass(frozen=True)
class GeometricMedian(Reduction):
    """The point with the smallest weighted sum of distances to all updates, by Weiszfeld's iteration.

    Attributes:
        max_iterations: The most iterations.
        tolerance: Ends when the point moves by less than this part of its norm.
    """

    max_iterations: int = 100
    tolerance: float = 1e-6
    _kind = "geometric_median"

    def _checked(self) -> Mapping[str, object]:
        tolerance = as_number(self.tolerance, Argument("tolerance"))
        if not 0 <= tolerance < 1:
            raise Argument("tolerance").error("a number of at least 0 and less than 1", self.tolerance)
        return {
            "max_iterations": as_integer(self.max_iterations, Argument("max_iterations"), _NATURAL),
            "tolerance": tolerance,
        }


_KINDS: dict[str, type[Any]] = {
    each._kind: each for each in (Mean, Sum, Median, Maximum, TrimmedMean, Krum, GeometricMedian)
}


def mean() -> Mean:
    """Returns the weighted mean, which is the default."""
    return Mean()


def sum() -> Sum:  # noqa: A001 (gradserve.reductions.sum)
    """Returns the weighted sum."""
    return Sum()


def median() -> Median:
    """Returns the median of each element."""
    return Median()


def maximum() -> Maximum:
    """Returns the reduction to the greatest value of each element."""
    return Maximum()


def trimmed_mean(fraction: float) -> TrimmedMean:
    """Returns the mean of each element without `fraction` of the values at each end."""
    return TrimmedMean(fraction)


def krum(num_byzantine: int, *, report_only: bool = False) -> Krum:
    """Returns the update that is closest to its neighbours, if `num_byzantine` workers may send anything.

    Args:
        num_byzantine: The number of these workers.
        report_only: Whether to use the mean of all, and only report which updates would have been dropped.
    """
    return Krum(num_byzantine, report_only=report_only)


def multi_krum(num_byzantine: int, num_selected: int, *, report_only: bool = False) -> Krum:
    """Returns the mean of the updates that are closest to their neighbours.

    Args:
        num_byzantine: The number of workers that may send anything.
        num_selected: The number of updates in the mean.
        report_only: Whether to use the mean of all, and only report which updates would have been dropped.
    """
    return Krum(num_byzantine, num_selected, report_only=report_only)


def geometric_median(max_iterations: int = 100, tolerance: float = 1e-6) -> GeometricMedian:
    """Returns the point with the smallest weighted sum of distances to all updates."""
    return GeometricMedian(max_iterations, tolerance)


_BY_NAME: dict[str, Callable[[], Reduction]] = {
    "mean": mean,
    "sum": sum,
    "median": median,
    "maximum": maximum,
    "geometric_median": geometric_median,
}


def as_reduction(value: object, argument: Argument) -> Reduction:
    """Returns the reduction that a user has given.

    Raises:
        InvalidArgumentError: It is neither a reduction nor the name of one.
    """
    if isinstance(value, Reduction) and type(value) is not Reduction:
        return value
    if not isinstance(value, str) or value.lower() not in _BY_NAME:
        names = ", ".join(map(repr, _BY_NAME))
        raise argument.error(f"a reduction of gradserve.reductions, such as krum(1), or one of {names},", value)
    return _BY_NAME[value.lower()]()


def reduction_message(reduction: Reduction) -> parameters_pb2.UpdateReduction:
    """Returns the message of a reduction."""
    message = parameters_pb2.UpdateReduction(report_only=isinstance(reduction, Krum) and reduction.report_only)
    settings = getattr(message, reduction._kind)
    settings.SetInParent()
    for each in settings.DESCRIPTOR.fields:
        setattr(settings, each.name, getattr(reduction, each.name))
    return message


def reduction_of(message: parameters_pb2.UpdateReduction) -> Reduction:
    """Returns the reduction of a message."""
    kind = message.WhichOneof("kind") or Mean._kind
    settings = getattr(message, kind)
    values = {each.name: getattr(settings, each.name) for each in settings.DESCRIPTOR.fields}
    if kind == Krum._kind:
        values["report_only"] = message.report_only
    reduction: Reduction = _KINDS[kind](**values)
    return reduction


_publish(__name__, globals(), __all__)
