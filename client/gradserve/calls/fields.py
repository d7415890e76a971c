"""Converts arguments to fields of messages."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import INT32, INT64, UINT64, as_flag, as_integer, as_number, as_text

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: INT32,
    FieldDescriptor.CPPTYPE_INT64: INT64,
    FieldDescriptor.CPPTYPE_UINT64: UINT64,
}


def plain_fields(message: type[Message], values: Mapping[str, object]) -> dict[str, Any]:
    """Returns arguments as values for the fields of the same names: text, flags and numbers.

    Raises:
        InvalidArgumentError: An argument does not fit its field.
    """
    return {name: plain_field(message, name, value, Argument(name)) for name, value in values.items()}


def plain_field(message: type[Message] | Message, field: str, value: object, argument: Argument) -> str | bool | float:
    """Returns an argument as a value for a field of text, a flag or a number.

    Raises:
        InvalidArgumentError: It does not fit the field.
    """
    kind = message.DESCRIPTOR.fields_by_name[field].cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return as_text(value, argument)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return as_flag(value, argument)
    if kind in _INTEGERS:
        return as_integer(value, argument, _INTEGERS[kind])
    return as_number(value, argument)
