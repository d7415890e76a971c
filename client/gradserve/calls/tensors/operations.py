"""Calls that take and return tensors, which travel the same way for every service."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.message import Message

from gradserve.calls.exchange import NOT_CARRIED, BeginCleanUp, CleanUp, NotCarried, Operation, Reply, Unary, Whole
from gradserve.calls.progress import Progress
from gradserve.calls.restarts import is_of_another_run
from gradserve.calls.tensors.arguments import (
    INLINE_LIMIT_BYTES,
    INTERRUPTIONS,
    delete_later,
    delete_quietly,
    encode_lease,
    handle_of,
    header_of,
    receive_results,
    upload,
)
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_flag
from gradserve.errors import AbortedError, DeadlineExceededError, GradserveError, InternalError, UnavailableError
from gradserve.results import TensorHandle
from gradserve.v1 import tensor_pb2
from gradserve.wire.arrays import AnyArray
from gradserve.wire.tensors import Contents, WithContents

OpInput: TypeAlias = AnyArray | TensorHandle
OpInputs: TypeAlias = OpInput | list[OpInput]
"""An input, ready to be sent."""


def call_with_inputs(
    service: str,
    method: str,
    inputs: Mapping[str, OpInputs],
    request: Callable[[dict[str, Any]], Message],
    *,
    device: str = "",
) -> Operation[Reply]:
    """Makes a call with tensors in its request; see `call_with_arrays`.

    Args:
        service: The name of the service, without its package.
        method: The name of the method.
        inputs: The inputs by name, some of them lists.
        request: Returns the request for the messages of the inputs, which have the same names.
        device: The device of the server that will need the inputs.
    """
    arrays = [each for value in inputs.values() for each in listed(value) if not isinstance(each, TensorHandle)]

    def with_messages(sent: Sequence[tensor_pb2.Tensor]) -> Message:
        supply = iter(sent)

        def message_of(value: OpInput) -> tensor_pb2.Tensor:
            return tensor_pb2.Tensor(handle=value.handle) if isinstance(value, TensorHandle) else next(supply)

        tensors = {
            name: [message_of(each) for each in value] if isinstance(value, list) else message_of(value)
            for name, value in inputs.items()
        }
        return request(tensors)

    return call_with_arrays(service, method, arrays, with_messages, device=device)


def call_with_arrays(
    service: str,
    method: str,
    arrays: Sequence[AnyArray],
    request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
    *,
    device: str = "",
    wait: float = 0.0,
    released: bool = False,
    in_place: bool = False,
    renew: Callable[[Any], Operation[None]] | None = None,
    progress: Progress | None = None,
) -> Operation[Reply]:
    """Makes a call with arrays in its request.

    They travel with it if they are small or a socket is open. Otherwise they are uploaded first and deleted afterwards.

    Args:
        service: The name of the service, without its package.
        method: The name of the method.
        arrays: The arrays.
        request: Returns the request for the messages of the arrays.
        device: The device of the server that will need the arrays.
        wait: How long the server may wait; see `Unary`.
        released: Whether the server deletes what was uploaded if the call succeeds.
        in_place: Whether arrays of the reply may be read-only memory of the server.
        renew: Makes a request one for the present run of the server, after that has refused it; see `Unary.renewal`.
        progress: Told how many bytes of the arrays, and of those of the reply, were moved.
    """
    contents = Contents()
    message = request(contents.tensors(arrays))
    whole = WithContents(message, contents)
    renewal = None if renew is None else partial(renew, message)
    num_bytes = sum([array.nbytes for array in arrays])
    if progress is not None:
        progress.sends(num_bytes)
    reply: Reply | NotCarried = yield Whole(
        Unary(service, method, whole, wait, in_place=in_place, renewal=renewal),
        over_grpc=num_bytes <= INLINE_LIMIT_BYTES,
        num_bytes=num_bytes,
        progress=progress,
    )
    if reply is not NOT_CARRIED:
        return reply
    while True:
        uploaded = yield from upload(header_of(arrays, None, device), arrays, progress)
        message = request(uploaded)
        try:
            return (
                yield from _call_with_uploads(
                    Unary(service, method, message, wait, in_place=in_place), uploaded, released=released
                )
            )
        except AbortedError as error:
            if renew is None or not is_of_another_run(error):
                raise
        # What was uploaded is lost, too.
        yield from renew(message)


def _call_with_uploads(call: Unary, uploaded: Sequence[tensor_pb2.Tensor], *, released: bool) -> Operation[Reply]:
    handles = [tensor.handle for tensor in uploaded]
    clean_up: BeginCleanUp = yield CleanUp()
    try:
        reply: Reply = yield Whole(call)
    except INTERRUPTIONS:
        delete_later(handles, clean_up)
        raise
    except (UnavailableError, DeadlineExceededError, InternalError):
        # The outcome is unknown: uploads end with their lease.
        raise
    except GradserveError as error:
        yield from delete_quietly(handles, error)
        raise
    if not released:
        yield from delete_quietly(handles)
    return reply


def receive_outputs(reply: Reply, tensors: Sequence[tensor_pb2.Tensor], *, keep: bool) -> Operation[list[Any]]:
    """Returns tensors of a reply: as handles if they stay on the server, otherwise as new arrays."""
    if keep:
        return [handle_of(tensor) for tensor in tensors]
    return (yield from receive_results(reply, tensors))


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
