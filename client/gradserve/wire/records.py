"""Messages as dataclasses with fields of the same names and types: lists are tuples, maps are dicts."""

import dataclasses
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

T = TypeVar("T")


def fill(message: Message, record: Any) -> None:
    """Sets the fields of an empty message from a dataclass."""
    for name, kind in _fields(cast("Hashable", type(record))).items():
        value = getattr(record, name)
        if isinstance(value, tuple):
            target = getattr(message, name)
            if kind is None:
                target.extend(value)
            else:
                for each in value:
                    fill(target.add(), each)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        elif dataclasses.is_dataclass(value):
            part = getattr(message, name)
            part.SetInParent()
            fill(part, value)
        else:
            setattr(message, name, value)


def read(message: Message, record_type: type[T]) -> T:
    """Returns a dataclass with the values of a message; fields that only one of the two has are left out."""
    values: dict[str, Any] = {}
    for name, kind in _fields(cast("Hashable", record_type)).items():
        descriptor = message.DESCRIPTOR.fields_by_name.get(name)
        if descriptor is None:
            continue
        value = getattr(message, name)
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            values[name] = dict(value)
        elif descriptor.is_repeated:
            values[name] = tuple(value) if kind is None else tuple([read(each, kind) for each in value])
        else:
            values[name] = value if kind is None else read(value, kind)
    return record_type(**values)


@cache
def _fields(record_type: Any) -> dict[str, Any]:
    """Returns the names of the fields, with the dataclass of which each is one or has some; None for other types."""
    hints = get_type_hints(record_type)
    return {each.name: _part_of(hints[each.name]) for each in dataclasses.fields(record_type)}


def _part_of(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return hint if dataclasses.is_dataclass(hint) else None
