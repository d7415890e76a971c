"""Mutations of what is valid: of bytes, and of the fields of messages."""

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_MOST_BYTES = 100_000

_INTEGERS = (0, 1, -1, 2, 3, 7, 64, 255, 256, 65_536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan)
_TEXTS = ("", "x", "default", "é", "a/b", "../../etc", "a\0b", "\U0001f600", "x" * 256, "x" * 257, "x" * 70_000)

_VALUES: dict[int, Callable[[random.Random], Any]] = {
    **dict.fromkeys(
        (
            FieldDescriptor.CPPTYPE_INT32,
            FieldDescriptor.CPPTYPE_INT64,
            FieldDescriptor.CPPTYPE_UINT32,
            FieldDescriptor.CPPTYPE_UINT64,
        ),
        lambda chance: chance.choice(_INTEGERS),
    ),
    **dict.fromkeys(
        (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE), lambda chance: chance.choice(_FLOATS)
    ),
    FieldDescriptor.CPPTYPE_BOOL: lambda chance: chance.random() < 0.5,
    FieldDescriptor.CPPTYPE_ENUM: lambda chance: chance.choice((0, 1, 2, 3, 99, -1)),
}


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Returns other bytes: some are changed, left out, repeated, cut off or added."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << chance.randrange(8)
            case 1 if place < len(changed):
                changed[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[place : place + chance.choice((1, 2, 8, 100))]
            case 3:
                changed[place:place] = chance.randbytes(chance.choice((1, 2, 8, 64)))
            case 4:
                part = changed[place : place + chance.choice((1, 4, 32, 256))]
                other = chance.randrange(len(changed) + 1)
                changed[other:other] = part
            case 5:
                del changed[place:]
    return bytes(changed[:_MOST_BYTES])


def mutated_message(message: Message, chance: random.Random) -> None:
    """Changes a field of a message, or of a message in it."""
    fields: Any = message.DESCRIPTOR.fields
    if not fields:
        return
    field = chance.choice(fields)
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            message.ClearField(field.name)
        elif field.is_repeated:
            _mutate_list(message, field, chance)
        elif field.message_type is not None and chance.random() < 0.8:
            mutated_message(getattr(message, field.name), chance)
        elif field.message_type is not None or chance.random() < 0.1:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _value(field, getattr(message, field.name), chance))
    except (ValueError, TypeError):  # the number does not fit into the field
        message.ClearField(field.name)


def _mutate_list(message: Message, field: FieldDescriptor, chance: random.Random) -> None:
    values = getattr(message, field.name)
    match chance.randrange(4):
        case 0 if values:
            del values[chance.randrange(len(values))]
        case 1 if values:
            values.extend([chance.choice(values)] * chance.choice((1, 2, 70)))
        case _ if field.message_type is not None:
            mutated_message(chance.choice(values) if values else values.add(), chance)
        case _:
            value = _value(field, values[0] if values else None, chance)
            if values and chance.random() < 0.7:
                values[chance.randrange(len(values))] = value
            else:
                values.append(value)


def _value(field: FieldDescriptor, old: Any, chance: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return mutated_bytes(old or b"", chance)
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(_TEXTS)
    return _VALUES[field.cpp_type](chance)


def mutated_request(data: bytes, kind: type[Message], chance: random.Random) -> bytes:
    """Returns another request: its fields are changed, or its bytes."""
    if chance.random() < 0.3:
        return mutated_bytes(data, chance)
    try:
        message = kind.FromString(data)
    except DecodeError:
        return mutated_bytes(data, chance)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        mutated_message(message, chance)
    return message.SerializeToString()[:_MOST_BYTES]
