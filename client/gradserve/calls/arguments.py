"""Checks and conversions of arguments that several operations share, and what errors and warnings say about them."""

import inspect
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gradserve.batch_norm import IgnoredArgument, IgnoredArgumentWarning
from gradserve.conversion.plain import (
    as_choice,
    as_handle,
    as_text,
)
from gradserve.conversion.tensors import as_tensor_or_numbers
from gradserve.results import TensorHandle, TensorLike
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import AnyArray, DType
from gradserve_protocol.errors import InvalidArgumentError, NotFoundError
from gradserve_protocol.v1 import accumulator_pb2

_PACKAGE = __name__.partition(".")[0]
_DURABILITIES = {
    "none": accumulator_pb2.DURABILITY_NONE,
    "round": accumulator_pb2.DURABILITY_ROUND,
    "gradient": accumulator_pb2.DURABILITY_GRADIENT,
}
_PLACE = re.compile(r"(?:config\.)?((\w+)(?:\[[^\]]*\])?)")
_OF_THE_CALL = frozenset({"layer", "placement", "forward_id", "lease", "request_id"})
"""Fields whose errors need no argument name."""


class IgnoredArguments:
    """Warns once about each ignored argument of one layer object. Safe to use from several threads."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def warn(self, ignored: Iterable[IgnoredArgument]) -> None:
        """Warns about the arguments not warned about before, at the line that called gradserve."""
        for each in ignored:
            with self._lock:
                is_new = each.argument not in self._warned
                self._warned.add(each.argument)
            if is_new:
                warn_of_ignored(each, f"batch normalization layer {self._layer!r}")


def warn_of_ignored(ignored: IgnoredArgument, owner: str) -> None:
    """Warns about an ignored argument of a layer or an op, at the line that called gradserve."""
    warnings.warn(
        f"{ignored.argument} of {owner} has no effect: {ignored.reason}",
        IgnoredArgumentWarning,
        stacklevel=depth_in_package(),
    )


def depth_in_package() -> int:
    """Returns the stacklevel of the innermost frame outside this package, as seen by the caller."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        depth, frame = depth + 1, frame.f_back
    return depth


def as_durability(value: str | None) -> accumulator_pb2.Durability:
    """Returns the code of a durability, that of none in particular for None.

    Raises:
        InvalidArgumentError: There is no such durability.
    """
    if value is None:
        return accumulator_pb2.DURABILITY_UNSPECIFIED
    return _DURABILITIES[as_choice(value, tuple(_DURABILITIES), Argument("durability"))]


def dtype_text(dtype: DType) -> str:
    """Returns a dtype as TensorFlow writes it."""
    return {"float16": "half", "float32": "float", "float64": "double"}.get(dtype.name, dtype.name)


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape as TensorFlow writes it."""
    return f"[{','.join(map(str, shape))}]"


def check_text_attribute(value: str, name: str, allowed: Sequence[str]) -> None:
    """Checks the value of a text attribute.

    Raises:
        InvalidArgumentError: It is not text, or not one of the allowed values.
    """
    text = as_text(value, Argument(name))
    check_attribute(f'"{text}"', name, [f'"{each}"' for each in allowed])


def check_attribute(value: str, name: str, allowed: Sequence[str], *, field: str | None = None) -> None:
    """Checks the value of an attribute as TensorFlow writes it, e.g. '"MEAN"' or 'float'.

    Raises:
        InvalidArgumentError: It is not allowed. `field` is the error's, by default the attribute's name.
    """
    if value not in allowed:
        raise InvalidArgumentError(
            f"Value for attr '{name}' of {value} is not in the list of allowed values: {', '.join(allowed)}",
            field=field or name,
        )


def as_op_input(
    value: TensorLike, default_dtype: DType, name: str, *, field: str | None = None
) -> AnyArray | TensorHandle:
    """Returns a value as an input of an op.

    Handles and arrays of any library keep their dtype. Numbers and sequences of numbers, which have none, get the
    default.

    Args:
        value: The input.
        default_dtype: The dtype of plain numbers.
        name: The name of the input.
        field: The field of an error; the name by default.

    Raises:
        InvalidArgumentError: It is neither an array nor numbers, or has a dtype that tensors cannot have.
    """
    if isinstance(value, TensorHandle):
        return as_handle(value, Argument(name, field))
    return as_tensor_or_numbers(value, default_dtype, Argument(name, field))


@contextmanager
def arguments_named(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Adds the argument's name to the message of an error about it, unless the message has it already.

    Args:
        names: The names of arguments that differ from the request's, by the request's field, or by an element such as
            "variables[0]".
    """
    try:
        yield
    except (InvalidArgumentError, NotFoundError) as error:
        place = _PLACE.match(error.field or "")
        if place is not None and place[2] not in _OF_THE_CALL:
            error.message = _with_name(error.message, place[1], place[2], names or {})
        raise


def _with_name(message: str, element: str, field: str, names: Mapping[str, str]) -> str:
    name = names.get(element) or names.get(field)
    if name is not None and _has_word(message, field):
        return re.sub(rf"\b{re.escape(field)}\b", name, message)
    if _has_word(message, name or field):
        return message
    return f"{name or element}: {message}"


def _has_word(message: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", message) is not None
