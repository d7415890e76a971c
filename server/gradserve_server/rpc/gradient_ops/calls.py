"""Requests of ops as their inputs and attributes, outputs as responses."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar, get_origin

from google.protobuf.message import Message

from gradserve.v1 import tensor_pb2
from gradserve_server.errors import ServiceError
from gradserve_server.rpc.tensors.messages import MAX_COMPONENTS, check_count, decode_tensor, request_fields
from gradserve_server.tensors.store import TensorStore

InputsT = TypeVar("InputsT")
AttributesT = TypeVar("AttributesT")
T = TypeVar("T")


@dataclass(frozen=True)
class OpenInputs(Generic[InputsT]):
    """The inputs of a call, as long as it uses them.

    Attributes:
        inputs: Read-only arrays, each in the memory of the device it lies in.
        handles: Of those that are stored, by the name of the input.
    """

    inputs: InputsT
    handles: Mapping[str, str]


def decode_attributes(request: Message, kind: type[AttributesT]) -> AttributesT:
    """Returns the attributes of a request; those that are unset have their defaults."""
    declared: Any = kind
    given = {field.name: getattr(request, field.name) for field in fields(declared) if _is_set(request, field.name)}
    return kind(**given)


@contextmanager
def open_inputs(store: TensorStore, request: Any, kind: type[InputsT]) -> Iterator[OpenInputs[InputsT]]:
    """Holds the inputs of a request while a call uses them.

    Raises:
        InvalidArgumentError: One is missing or malformed.
        NotFoundError: A handle does not exist.
    """
    tensors = _tensors_of(request, kind)
    handles = {name: tensor.handle for name, tensor in tensors.items() if tensor.WhichOneof("data") == "handle"}
    with ExitStack() as used_by_the_call:
        with _inputs_named(tensors):
            with request_fields({f"handles[{index}]": f"{name}.handle" for index, name in enumerate(handles)}):
                used = used_by_the_call.enter_context(store.use(list(handles.values())))
            arrays = {name: decode_tensor(tensor, used.arrays, name) for name, tensor in tensors.items()}
        yield OpenInputs(kind(**_joined(kind, arrays)), handles)


@contextmanager
def _inputs_named(names: Iterable[str]) -> Iterator[None]:
    """Begins the message of an error about an input with its name."""
    try:
        yield
    except ServiceError as error:
        for name in names:
            if error.field is not None and (error.field == name or error.field.startswith(f"{name}.")):
                error.message = f"{name}: {error.message}"
        raise


def encode_response(response: type[Message], outputs: Any, tensors: Mapping[str, tensor_pb2.Tensor]) -> Message:
    """Returns a response.

    Args:
        response: Its type.
        outputs: The dataclass of the op's outputs.
        tensors: The messages of the outputs that are there, by name, as `arrays_of` names them.
    """
    return response(**_joined(type(outputs), tensors))


def _tensors_of(request: Any, kind: type[Any]) -> dict[str, tensor_pb2.Tensor]:
    """Returns the messages of the inputs that are required or given, by name; "weights[1]" in a repeated field."""
    tensors: dict[str, tensor_pb2.Tensor] = {}
    for field in fields(kind):
        value = getattr(request, field.name)
        if request.DESCRIPTOR.fields_by_name[field.name].is_repeated:
            check_count(value, MAX_COMPONENTS, "tensors", field.name)
            tensors |= {f"{field.name}[{index}]": tensor for index, tensor in enumerate(value)}
        elif request.HasField(field.name) or field.default is MISSING:
            tensors[field.name] = value
    return tensors


def _joined(kind: type[Any], values: Mapping[str, T]) -> dict[str, T | tuple[T, ...]]:
    """Returns values by the names of a dataclass's fields, those of one tuple together."""
    joined: dict[str, T | tuple[T, ...]] = {}
    for field in fields(kind):
        if field.name in values:
            joined[field.name] = values[field.name]
        elif get_origin(field.type) is tuple:
            joined[field.name] = tuple(value for name, value in values.items() if name.startswith(f"{field.name}["))
    return joined


def _is_set(request: Message, name: str) -> bool:
    """Tells whether a field was given; a string without presence was when it is not empty."""
    if request.DESCRIPTOR.fields_by_name[name].has_presence:
        return request.HasField(name)
    return bool(getattr(request, name))
