"""Calls that take and return tensors: how these travel is the same for every service."""

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
"""An input as it is sent."""


def call_with_inputs(
    service: str,
    method: str,
    inputs: Mapping[str, OpInputs],
    request: Callable[[dict[str, Any]], Message],
) -> Operation[Any]:
    """Makes a call with tensors in its request.

    Arrays travel inside the request when they are not large together, else they are uploaded first and deleted
    afterwards.

    Args:
        service: Name of the service, without its package.
        method: Name of the method.
        inputs: By name, some of them lists.
        request: Makes the request of the messages of the inputs, by the same names.

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
    """Makes a call, and deletes what was uploaded for it.

    Args:
        call: The call.
        sent: The arrays in its request, inline or uploaded.
        released: Whether the server itself deletes them when the call succeeds.

    Returns:
        The response.
    """
    uploaded = [tensor.handle for tensor in sent if is_stored(tensor)]
    try:
        reply = yield call
    except (UnavailableError, DeadlineExceededError, InternalError):
        # Nobody knows what became of it: what was uploaded goes when its lease ends.
        raise
    except GradserveError as error:
        yield from delete_quietly(uploaded, error)
        raise
    if not released:
        yield from delete_quietly(uploaded)
    return reply


def receive_outputs(tensors: Sequence[tensor_pb2.Tensor], *, keep: bool) -> Operation[list[Any]]:
    """Returns the tensors of a reply: as handles if they were to stay on the server, else as new arrays."""
    if keep:
        return [handle_of(tensor) for tensor in tensors]
    return (yield from receive_results(tensors))


def placement_of(*, keep: bool, lease: float | None = None) -> tensor_pb2.Placement:
    """Returns where the tensors of a reply go, and for how many seconds they live there without use.

    Raises:
        InvalidArgumentError: `keep` is no flag, or the lease no number that can be sent.
    """
    is_kept = as_flag(keep, Argument("keep"))
    mode = tensor_pb2.Placement.MODE_KEEP if is_kept else tensor_pb2.Placement.MODE_AUTO
    return tensor_pb2.Placement(mode=mode, lease=None if lease is None else encode_lease(lease))


def listed(value: Any) -> list[Any]:
    """Returns a value that is not a list as a list of it."""
    return value if isinstance(value, list) else [value]
