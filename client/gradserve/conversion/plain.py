"""Plain values: text, flags, numbers and shapes."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradserve.conversion.argument import Argument
from gradserve.conversion.arrays import as_array, has_dtype

INT32 = range(-(1 << 31), 1 << 31)
INT64 = range(-(1 << 63), 1 << 63)
UINT64 = range(1 << 64)


def as_text(value: object, argument: Argument) -> str:
    """Returns text that can be sent.

    Raises:
        InvalidArgumentError: It is no text, or has characters that Unicode has not.
    """
    if isinstance(value, str) and is_text(value):
        return value
    raise argument.error("text", value)


def is_text(value: object) -> bool:
    """Tells whether a value is text that can be sent."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_choice(value: object, allowed: Sequence[str], argument: Argument) -> str:
    """Returns one of several words, in lower case or in capitals, as these are written.

    Raises:
        InvalidArgumentError: It is none of them.
    """
    for word in allowed:
        if isinstance(value, str) and value in (word, word.lower(), word.upper()):
            return word
    raise argument.error(" or ".join(map(repr, allowed)), value)


def as_list(value: Any, expected: str, argument: Argument) -> list[Any]:
    """Returns what an iterable other than text or a mapping has.

    Raises:
        InvalidArgumentError: It is no such iterable.
    """
    if not isinstance(value, str | bytes | bytearray | Mapping):
        try:
            return list(value)
        except Exception:  # each library has its own
            pass
    raise argument.error(expected, value)


def as_mapping(value: Any, argument: Argument) -> dict[str, Any]:
    """Returns a mapping by names that can be sent.

    Raises:
        InvalidArgumentError: It is something else, or has other keys.
    """
    if not isinstance(value, Mapping):
        raise argument.error("a dict by name", value)
    for name in value:
        if not is_text(name):
            raise argument.error("names as keys", name)
    return dict(value)


def as_flag(value: Any, argument: Argument) -> bool:
    """Returns True or False, also for 1 and 0.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if isinstance(value, np.bool_):
        return bool(value)
    try:
        return bool(as_integer(value, argument, range(2)))
    except ValueError:
        raise argument.error("True or False", value) from None


def as_integer(value: Any, argument: Argument, allowed: range = INT64) -> int:
    """Returns an integer, also of a scalar array or tensor of integers.

    Raises:
        InvalidArgumentError: It is none, or not one of those allowed.
    """
    try:
        number = operator.index(value)
    except Exception:  # each library has its own
        raise argument.error("an integer", value) from None
    if number not in allowed:
        raise argument.error(f"an integer from {allowed.start} to {allowed.stop - 1}", number)
    return number


def as_number(value: Any, argument: Argument) -> float:
    """Returns a number, also of a scalar array or tensor. NaN and infinities are numbers.

    Raises:
        InvalidArgumentError: It is no number, or an integer that is too large.
    """
    if not isinstance(value, str | bytes | bytearray) and not getattr(value, "ndim", 0):
        try:
            return float(value)
        except Exception:  # each library has its own
            pass
    raise argument.error("a number", value)


def as_shape(value: Any, argument: Argument) -> tuple[int, ...]:
    """Returns sizes: those that are unknown, None or -1, as -1.

    Raises:
        InvalidArgumentError: It is no sequence of sizes.
    """
    expected = "a tuple of sizes, integers or None where unknown,"
    if isinstance(value, set | frozenset):
        raise argument.error(expected, value)
    sizes = as_list(as_array(value, argument).tolist() if has_dtype(value) else value, expected, argument)
    return tuple(-1 if size is None else as_integer(size, argument) for size in sizes)
