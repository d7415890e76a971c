"""Protobuf messages as dataclasses with the same fields (lists as tuples, maps as dicts); durations and codecs."""

import dataclasses
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gradserve_protocol.codecs import Codec
from gradserve_protocol.v1 import codecs_pb2

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
    """Returns a dataclass with the values of a message; skips fields that only one of them has."""
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


def encode_duration(seconds: float) -> Duration:
    """Returns a finite number of seconds, up to 10,000 years, as a Duration, to the nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def decode_duration(message: Any, field: str) -> float | None:
    """Returns a Duration field of a message in seconds, None when it is unset."""
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    return duration.seconds + duration.nanos * 1e-9


def encode_codec(codec: Codec) -> codecs_pb2.Codec:
    """Returns the value for a codec in messages."""
    return cast("codecs_pb2.Codec", codec.number)


@cache
def _fields(record_type: Any) -> dict[str, Any]:
    """Returns the dataclass that each field holds or lists, by field name; None for other types."""
    hints = get_type_hints(record_type)
    return {each.name: _part_of(hints[each.name]) for each in dataclasses.fields(record_type)}


def _part_of(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return hint if dataclasses.is_dataclass(hint) else None
