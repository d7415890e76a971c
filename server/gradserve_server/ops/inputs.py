"""Opens the inputs of a call."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, get_origin

from gradserve_server.errors import ServiceError
from gradserve_server.ops.operation import InputsT
from gradserve_server.tensors.opening import OpenedTensors, TensorOpener
from gradserve_server.tensors.references import Reference

T = TypeVar("T")


@dataclass(frozen=True)
class OpenInputs(Generic[InputsT]):
    """The inputs of a call, while it uses them.

    Attributes:
        inputs: Read-only arrays, each in the memory of its device.
        tensors: The same as opened tensors of the request.
    """

    inputs: InputsT
    tensors: OpenedTensors


@contextmanager
def open_inputs(
    opener: TensorOpener, references: Mapping[str, Reference], kind: type[InputsT]
) -> Iterator[OpenInputs[InputsT]]:
    """Holds the inputs of a call while it uses them.

    Args:
        opener: Opens the tensors.
        references: The references by the names of inputs; "weights[1]" is one of a tuple.
        kind: The dataclass of the inputs.

    Raises:
        InvalidArgumentError: An input is malformed.
        NotFoundError: A handle does not exist.
    """
    with ExitStack() as used_by_the_call:
        with _inputs_named(references):
            tensors = used_by_the_call.enter_context(opener.open(references))
            arrays = tensors.arrays()
        yield OpenInputs(kind(**joined(kind, arrays)), tensors)


def joined(kind: type[Any], values: Mapping[str, T]) -> dict[str, T | tuple[T, ...]]:
    """Returns values by the names of a dataclass's fields, with the values of a tuple joined."""
    by_field: dict[str, T | tuple[T, ...]] = {}
    for field in fields(kind):
        if field.name in values:
            by_field[field.name] = values[field.name]
        elif get_origin(field.type) is tuple:
            by_field[field.name] = tuple(value for name, value in values.items() if name.startswith(f"{field.name}["))
    return by_field


@contextmanager
def _inputs_named(names: Iterable[str]) -> Iterator[None]:
    """Puts the name of an input at the beginning of the message of an error about it."""
    try:
        yield
    except ServiceError as error:
        for name in names:
            if error.field is not None and (error.field == name or error.field.startswith(f"{name}.")):
                error.message = f"{name}: {error.message}"
        raise
