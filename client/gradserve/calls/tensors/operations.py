"""Calls that take and return tensors, which travel the same way for every service."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.message import Message

from gradserve.calls.exchange import Operation, Unary
from gradserve.calls.tensors.arguments import delete_quietly, encode_lease, handle_of, receive_results, send_inputs
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_flag
from gradserve.errors import DeadlineExceededError, GradserveError, InternalError, UnavailableError
from gradserve.results import TensorHandle
from gradserve.v1 import tensor_pb2
from gradserve.wire.contents import Contents, WithContents, is_stored
from gradserve.wire.payload import Array

OpInputs: TypeAlias = Array | TensorHandle | list[Array | TensorHandle]
"""An input, ready to be sent."""


def call_with_inputs(
    service: str,
    method: str,
    inputs: Mapping[str, OpInputs],
    request: Callable[[dict[str, Any]], Message],
) -> Operation[Any]:
    """Makes a call with tensors in its request.

    Small arrays travel inside the request; larger ones are uploaded first and deleted afterwards.

    Args:
        service: The name of the service, without its package.
        method: The name of the method.
        inputs: The inputs by name, some of them lists.
        request: Returns the request for the messages of the inputs, which have the same names.

    Returns:
        The response.
    """
    contents = Contents()
    arrays = [each for value in inputs.values() for each in listed(value) if not isinstance(each, TensorHandle)]
    sent = yield from send_inputs(tuple(arrays), contents)
    supply = iter(sent)

    def message_of(value: Array | TensorHandle) -> tensor_pb2.Tensor:
        return tensor_pb2.Tensor(handle=value.handle) if isinstance(value, TensorHandle) else next(supply)

    tensors = {
        name: [message_of(each) for each in value] if isinstance(value, list) else message_of(value)
        for name, value in inputs.items()
    }
    call = Unary(service, method, WithContents(request(tensors), contents))
    return (yield from call_with_uploads(call, sent))


def call_with_uploads(call: Unary, sent: Sequence[tensor_pb2.Tensor], *, released: bool = False) -> Operation[Any]:
    """Makes a call, and deletes the arrays that were uploaded for it.

    Args:
        call: The call.
        sent: The arrays in its request, inline or uploaded.
        released: Whether the server deletes them itself if the call succeeds.

    Returns:
        The response.
    """
    uploaded = [tensor.handle for tensor in sent if is_stored(tensor)]
    try:
        reply = yield call
    except (UnavailableError, DeadlineExceededError, InternalError):
        # The outcome is unknown: uploads end with their lease.
        raise
    except GradserveError as error:
        yield from delete_quietly(uploaded, error)
        raise
    if not released:
        yield from delete_quietly(uploaded)
    return reply


def receive_outputs(tensors: Sequence[tensor_pb2.Tensor], *, keep: bool) -> Operation[list[Any]]:
    """Returns the tensors of a reply: as handles if they stay on the server, otherwise as new arrays."""
    if keep:
        return [handle_of(tensor) for tensor in tensors]
    return (yield from receive_results(tensors))


def placement_of(*, keep: bool, lease: float | None = None) -> tensor_pb2.Placement:
    """Returns where to put the tensors of a reply, and for how many seconds without use they live on the server.

    Raises:
        InvalidArgumentError: `keep` is not a flag, or the lease is not a number that can be sent.
    """
    is_kept = as_flag(keep, Argument("keep"))
    mode = tensor_pb2.Placement.MODE_KEEP if is_kept else tensor_pb2.Placement.MODE_AUTO
    return tensor_pb2.Placement(mode=mode, lease=None if lease is None else encode_lease(lease))


def listed(value: Any) -> list[Any]:
    """Returns a list unchanged, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]
