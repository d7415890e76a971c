"""Conversion of durabilities between messages and domain values."""

from gradserve.v1 import accumulator_pb2
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.state.durability import Durability

_DURABILITIES = {
    accumulator_pb2.DURABILITY_NONE: Durability.NONE,
    accumulator_pb2.DURABILITY_ROUND: Durability.ROUND,
    accumulator_pb2.DURABILITY_GRADIENT: Durability.GRADIENT,
}
_CODES = {durability: code for code, durability in _DURABILITIES.items()}


def decode_durability(code: accumulator_pb2.Durability, field: str) -> Durability | None:
    """Returns the durability of a request, None if it asks for none.

    Raises:
        InvalidArgumentError: The code is unknown.
    """
    if not code:
        return None
    if code not in _DURABILITIES:
        raise InvalidArgumentError(f"expected a known durability, got {code}", field=field)
    return _DURABILITIES[code]


def encode_durability(durability: Durability | None) -> accumulator_pb2.Durability:
    """Returns the code of a durability."""
    return accumulator_pb2.DURABILITY_UNSPECIFIED if durability is None else _CODES[durability]
