"""Checks and converts plain values: text, flags, numbers, shapes and handles, and those of a message's fields."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gradserve.conversion.arrays import as_array, has_dtype
from gradserve.results import TensorHandle
from gradserve_protocol.argument import READING_ERRORS, Argument, described

_BOOLS = bool | np.bool_
_TEXTS = str | bytes | bytearray
INT32 = range(-(1 << 31), 1 << 31)
INT64 = range(-(1 << 63), 1 << 63)
UINT64 = range(1 << 64)


def as_text(value: object, argument: Argument) -> str:
    """Returns text that can be sent.

    Raises:
        InvalidArgumentError: It is not text, or has characters that Unicode does not have.
    """
    if is_text(value):
        return value
    raise argument.error("text", value)


def is_text(value: object) -> TypeGuard[str]:
    """Returns True if a value is text that can be sent."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_choice(value: object, allowed: Sequence[str], argument: Argument) -> str:
    """Returns the allowed word that the text is, whether in lower case or in capitals.

    Raises:
        InvalidArgumentError: It is none of them.
    """
    for word in allowed:
        if isinstance(value, str) and value in (word, word.lower(), word.upper()):
            return word
    raise argument.error(" or ".join(map(repr, allowed)), value)


def as_list(value: Any, expected: str, argument: Argument) -> list[Any]:
    """Returns the items of an iterable other than text or a mapping.

    Raises:
        InvalidArgumentError: It is not such an iterable.
    """
    if isinstance(value, _TEXTS | Mapping):
        raise argument.error(expected, value)
    try:
        return list(value)
    except READING_ERRORS as error:
        raise argument.error(expected, value) from _cause(error)


def as_mapping(value: Any, argument: Argument) -> dict[str, Any]:
    """Returns a mapping whose keys are names that can be sent.

    Raises:
        InvalidArgumentError: It is something else, or has other keys.
    """
    if not isinstance(value, Mapping):
        raise argument.error("a dict by name", value)
    for name in value:
        if not is_text(name):
            raise argument.error("names as keys", name)
    return dict(value)


def as_texts(value: Any, argument: Argument) -> dict[str, str]:
    """Returns a mapping of texts by name.

    Raises:
        InvalidArgumentError: It is something else.
    """
    return {
        name: as_text(each, Argument(f"{argument.name}[{described(name)}]", field=argument.name))
        for name, each in as_mapping(value, argument).items()
    }


def is_bool(value: object) -> bool:
    """Returns True if a value is True or False, of Python or NumPy, also as an array of no dimensions."""
    if isinstance(value, np.ndarray):
        return value.dtype == np.bool_ and not value.ndim
    return isinstance(value, _BOOLS)


def as_flag(value: Any, argument: Argument) -> bool:
    """Returns True or False; takes 1 and 0, too, and scalar arrays of one of these.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if is_bool(value):
        return bool(value)
    try:
        return bool(as_integer(value, argument, range(2)))
    except ValueError:
        raise argument.error("True or False", value) from None


def as_integer(value: Any, argument: Argument, allowed: range = INT64) -> int:
    """Returns an integer; takes scalar arrays and tensors of integers, too.

    Raises:
        InvalidArgumentError: It is not an integer, or out of range.
    """
    try:
        number = operator.index(value)
    except READING_ERRORS as error:
        raise argument.error("an integer", value) from _cause(error)
    if number not in allowed:
        raise argument.error(f"an integer from {allowed.start} to {allowed.stop - 1}", number)
    return number


def as_number(value: Any, argument: Argument) -> float:
    """Returns a number; takes scalar arrays and tensors, too. NaN and infinities are numbers.

    Raises:
        InvalidArgumentError: It is not a number, or an integer that is too large.
    """
    if type(value) is float:
        return value
    num_dimensions: int = getattr(value, "ndim", 0)
    if isinstance(value, _TEXTS) or num_dimensions:
        raise argument.error("a number", value)
    try:
        return float(value)
    except READING_ERRORS as error:
        raise argument.error("a number", value) from _cause(error)


def as_shape(value: Any, argument: Argument) -> tuple[int, ...]:
    """Returns a shape, with -1 for unknown sizes, which may be given as None or -1.

    Raises:
        InvalidArgumentError: It is not a sequence of sizes.
    """
    expected = "a tuple of sizes, integers or None where unknown,"
    if isinstance(value, set | frozenset):
        raise argument.error(expected, value)
    sizes = as_list(as_array(value, argument).tolist() if has_dtype(value) else value, expected, argument)
    return tuple(-1 if size is None else as_integer(size, argument) for size in sizes)


def as_handle(value: Any, argument: Argument) -> TensorHandle:
    """Returns the handle of a tensor.

    Raises:
        InvalidArgumentError: It is something else, or was not made by the client.
    """
    if not isinstance(value, TensorHandle):
        raise argument.error("a TensorHandle", value)
    if not (is_text(value.handle) and isinstance(value.dtype, np.dtype) and isinstance(value.shape, tuple)):
        raise argument.error_saying("a TensorHandle that the client returned", "another one")
    return value


def as_handles(values: Sequence[Any], name: str) -> list[TensorHandle]:
    """Returns the handles of tensors, given the name of their argument.

    Raises:
        InvalidArgumentError: One of them is something else.
    """
    return [as_handle(value, Argument(f"{name}[{index}]")) for index, value in enumerate(values)]


def _cause(error: Exception) -> Exception | None:
    """Returns an error as the cause of another; None if it only says that a value is of the wrong type."""
    return None if isinstance(error, TypeError | ValueError | OverflowError) else error


_Plain: TypeAlias = str | bool | float
_Convert: TypeAlias = Callable[[Any, Argument], _Plain]

_CONVERSIONS: dict[int, _Convert] = {
    FieldDescriptor.CPPTYPE_STRING: as_text,
    FieldDescriptor.CPPTYPE_BOOL: as_flag,
    FieldDescriptor.CPPTYPE_INT32: partial(as_integer, allowed=INT32),
    FieldDescriptor.CPPTYPE_INT64: partial(as_integer, allowed=INT64),
    FieldDescriptor.CPPTYPE_UINT64: partial(as_integer, allowed=UINT64),
    FieldDescriptor.CPPTYPE_FLOAT: as_number,
    FieldDescriptor.CPPTYPE_DOUBLE: as_number,
    FieldDescriptor.CPPTYPE_ENUM: partial(as_integer, allowed=INT32),
}


def plain_fields(message: type[Message], values: Mapping[str, object]) -> dict[str, Any]:
    """Returns arguments as values for the fields of the same names: text, flags and numbers.

    Raises:
        InvalidArgumentError: An argument does not fit its field.
    """
    fields = {}
    for name, value in values.items():
        convert, argument = _conversion(message.DESCRIPTOR, name)
        fields[name] = convert(value, argument)
    return fields


def plain_field(message: type[Message] | Message, field: str, value: object, argument: Argument) -> _Plain:
    """Returns an argument as a value for a field of text, a flag or a number.

    Raises:
        InvalidArgumentError: It does not fit the field.
    """
    return _CONVERSIONS[message.DESCRIPTOR.fields_by_name[field].cpp_type](value, argument)


@cache
def _conversion(message: Descriptor, field: str) -> tuple[_Convert, Argument]:
    """Returns what converts the argument of the same name as a field."""
    return _CONVERSIONS[message.fields_by_name[field].cpp_type], Argument(field)
