"""Converts requests of ops to references of inputs and attributes, and outputs to responses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message

from gradserve.v1 import tensor_pb2
from gradserve_server.limits import MAX_NAME_BYTES, MAX_NETWORK_PARTS, check_count, check_length
from gradserve_server.ops.runner import joined
from gradserve_server.rpc.boundary.messages import Serialized, repeated
from gradserve_server.rpc.tensors.messages import decode_reference
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.payload import Payload
from gradserve_server.tensors.references import Reference

AttributesT = TypeVar("AttributesT")


def decode_attributes(request: Message, kind: type[AttributesT]) -> AttributesT:
    """Returns the attributes of a request, with defaults for unset ones.

    Raises:
        InvalidArgumentError: A name is too long.
    """
    declared: Any = kind
    given = {field.name: getattr(request, field.name) for field in fields(declared) if _is_set(request, field.name)}
    for name, value in given.items():
        if isinstance(value, str):
            check_length(value, MAX_NAME_BYTES, name)
    return kind(**given)


def num_parts(request: Any, kind: type[Any]) -> int:
    """Returns the number of tensors in the repeated fields of a request."""
    declared = request.DESCRIPTOR.fields_by_name
    return sum(len(getattr(request, field.name)) for field in fields(kind) if declared[field.name].is_repeated)


def decode_inputs(request: Any, kind: type[Any], payload: Payload, user: Identity = ANONYMOUS) -> dict[str, Reference]:
    """Returns the references of the inputs that are required or given, by name; "weights[1]" for a repeated field.

    Raises:
        InvalidArgumentError: There are too many of them.
    """
    references: dict[str, Reference] = {}
    for field in fields(kind):
        value = getattr(request, field.name)
        if request.DESCRIPTOR.fields_by_name[field.name].is_repeated:
            check_count(value, MAX_NETWORK_PARTS, "tensors", field.name)
            references |= {
                f"{field.name}[{index}]": decode_reference(tensor, payload, user) for index, tensor in enumerate(value)
            }
        elif request.HasField(field.name) or field.default is MISSING:
            references[field.name] = decode_reference(value, payload, user)
    return references


def encode_response(response: type[Message], outputs: Any, tensors: Mapping[str, tensor_pb2.Tensor]) -> Message:
    """Returns the response of an op.

    Args:
        response: The type of the response.
        outputs: The dataclass of the op's outputs.
        tensors: The messages of the existing outputs, by name, as `arrays_of` names them.
    """
    return response(**joined(type(outputs), tensors))


def serialize_response(response: type[Message], outputs: Any, tensors: Iterator[tensor_pb2.Tensor]) -> Serialized:
    """Returns what `encode_response` does, for any number of tensors, which come in the order of `arrays_of`."""
    parts: list[bytes] = []
    for field in fields(outputs):
        value = getattr(outputs, field.name)
        if value is not None:
            of_field = islice(tensors, len(value) if isinstance(value, tuple) else 1)
            parts += repeated(of_field, partial(_with, response, field.name, is_list=isinstance(value, tuple)))
    return Serialized(b"".join(parts))


def _with(response: type[Message], name: str, tensors: Sequence[tensor_pb2.Tensor], *, is_list: bool) -> Message:
    return response(**{name: tensors if is_list else tensors[0]})


def _is_set(request: Message, name: str) -> bool:
    """Returns True if a field was given; a string without presence counts as given if it is not empty."""
    if request.DESCRIPTOR.fields_by_name[name].has_presence:
        return request.HasField(name)
    return bool(getattr(request, name))
