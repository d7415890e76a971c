"""Operations on ops: what goes over the wire, the same for every op."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from gradserve.calls.argument_names import arguments_named
from gradserve.calls.exchange import Operation
from gradserve.calls.fields import plain_fields
from gradserve.calls.tensors.arguments import delete_quietly
from gradserve.calls.tensors.operations import OpInputs, call_with_inputs, listed, placement_of, receive_outputs
from gradserve.conversion.argument import Argument
from gradserve.conversion.casting import as_array_or_numbers
from gradserve.conversion.handles import as_handle
from gradserve.results import TensorHandle, TensorLike
from gradserve.wire.dtypes import DType
from gradserve.wire.payload import Array

_SERVICE = "GradientOpsService"


def as_op_input(
    value: TensorLike, default_dtype: DType, name: str, *, field: str | None = None
) -> Array | TensorHandle:
    """Returns a value as an input of an op.

    Handles and arrays of any library keep their dtype. Numbers and sequences of numbers, which have none, get the
    default one.

    Args:
        value: The input.
        default_dtype: That of numbers.
        name: Of the input.
        field: Of an error, where that is another.

    Raises:
        InvalidArgumentError: It is no array and no numbers, or no tensor can have its dtype.
    """
    if isinstance(value, TensorHandle):
        return as_handle(value, Argument(name, field))
    return as_array_or_numbers(value, default_dtype, Argument(name, field))


def run_op(
    method: str,
    request: type[Message],
    inputs: Mapping[str, OpInputs],
    attributes: Mapping[str, Any],
    *,
    keep: bool,
    lease: float | None,
    names: Mapping[str, str] | None = None,
) -> Operation[dict[str, Any]]:
    """Computes an op on the server.

    Args:
        method: The name of its RPC.
        request: The type of its request.
        inputs: By name, some of them lists. Arrays travel inside the request when they are not large together, else
            they are uploaded first and deleted afterwards.
        attributes: By name.
        keep: Whether the outputs stay on the server.
        lease: For how many seconds then; None for the server's default.
        names: What the caller knows inputs and attributes by, where that is another name.

    Returns:
        The outputs by name, some of them lists: handles if they stay on the server, else new arrays.
    """
    fields = plain_fields(request, attributes)
    placement = placement_of(keep=keep, lease=lease)
    with arguments_named(names):
        reply = yield from call_with_inputs(
            _SERVICE, method, inputs, lambda tensors: request(**tensors, **fields, placement=placement)
        )
    tensors = [(part.name, list(value) if part.is_repeated else value) for part, value in reply.ListFields()]
    received = yield from receive_outputs([each for _, value in tensors for each in listed(value)], keep=keep)
    outputs = iter(received)
    return {
        name: [next(outputs) for _ in value] if isinstance(value, list) else next(outputs) for name, value in tensors
    }


def without_output(outputs: dict[str, Any], name: str) -> Operation[dict[str, Any]]:
    """Returns the outputs of a version of an op that does not have one of them; deletes that where it was kept."""
    unknown = outputs.pop(name)
    if isinstance(unknown, TensorHandle):
        yield from delete_quietly([unknown.handle])
    return outputs
