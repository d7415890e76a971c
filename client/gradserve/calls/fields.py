"""Converts arguments to fields of messages."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import INT32, INT64, UINT64, as_flag, as_integer, as_number, as_text

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
