"""Levels of durability as clients name them."""

from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_choice
from gradserve.v1 import accumulator_pb2

_DURABILITIES = {
    "none": accumulator_pb2.DURABILITY_NONE,
    "round": accumulator_pb2.DURABILITY_ROUND,
    "gradient": accumulator_pb2.DURABILITY_GRADIENT,
}


def as_durability(value: str | None) -> accumulator_pb2.Durability:
    """Returns the code of a durability, that of none in particular for None.

    Raises:
        InvalidArgumentError: There is no such durability.
    """
    if value is None:
        return accumulator_pb2.DURABILITY_UNSPECIFIED
    return _DURABILITIES[as_choice(value, tuple(_DURABILITIES), Argument("durability"))]
