"""Calls that take and return tensors, which travel the same way for every service."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gradserve.calls.exchange import (
    NOT_CARRIED,
    BeginCleanUp,
    CallbackError,
    CleanUp,
    Download,
    NotCarried,
    Operation,
    Progress,
    Repeat,
    Reply,
    Unary,
    Upload,
    Whole,
    forget,
)
from gradserve.calls.retries import is_of_another_run, new_receipt, renew_receipt
from gradserve.conversion.plain import as_flag, as_number
from gradserve.results import TensorHandle
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import AnyArray, Array, buffer_of, host_array
from gradserve_protocol.errors import (
    AbortedError,
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from gradserve_protocol.gpu import GpuArray
from gradserve_protocol.messages import encode_duration
from gradserve_protocol.tensors import Contents, WithContents, to_data_type, to_dtype
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_pb2

INLINE_LIMIT_BYTES = 3 << 20
"""Over gRPC, arrays of up to this size in total travel inside the request; a stream of their own would take longer."""
INTERRUPTIONS = (GeneratorExit, CallCancelledError)
"""Raised in an operation that has to end at once and can make no more calls; `CleanUp` is for these."""
_CLEAN_UP_SECONDS = 5.0
"""The time limit of a call that cleans up."""
OpInput: TypeAlias = AnyArray | TensorHandle


def put(
    arrays: Sequence[AnyArray], lease: float | None, device: str, progress: Progress | None = None
) -> Operation[list[TensorHandle]]:
    """Stores arrays on the server, in the memory of a device."""
    if progress is not None:
        progress.sends(sum(array.nbytes for array in arrays))
    header = header_of(arrays, lease, device)
    contents = Contents()
    request = messages_pb2.StoreTensorsRequest(
        tensors=contents.tensors(arrays), lease=_lease_of(header), device=device, receipt=new_receipt()
    )
    call = Unary("TensorService", "StoreTensors", WithContents(request, contents))
    reply: Reply | NotCarried = yield Whole(call, over_grpc=False, num_bytes=contents.num_bytes, progress=progress)
    if reply is NOT_CARRIED:
        stored = yield from upload(header, arrays, progress)
    else:
        stored = list(reply.message.tensors)
    if progress is not None:
        try:
            progress.end()
        except CallbackError as error:
            yield from delete_quietly([each.handle for each in stored], error)
            raise
    return [TensorHandle(tensor.handle, array.dtype, array.shape) for tensor, array in zip(stored, arrays, strict=True)]


def get(handles: Sequence[TensorHandle], progress: Progress | None = None, *, release: bool) -> Operation[list[Array]]:
    """Reads stored arrays, and then deletes them if `release`."""
    is_released = as_flag(release, Argument("release"))
    names = [each.handle for each in handles]
    num_bytes = sum(int(np.prod(each.shape)) * each.dtype.itemsize for each in handles)
    if progress is not None:
        progress.receives(num_bytes)
    call = Unary("TensorService", "ReadTensors", messages_pb2.ReadTensorsRequest(handles=names, release=is_released))
    reply: Reply | NotCarried = yield Whole(
        call, over_grpc=False, num_bytes=num_bytes, repeat=Repeat.of_read(releases=is_released), progress=progress
    )
    if reply is not NOT_CARRIED:
        return arrays_in(reply, reply.message.tensors)
    request = messages_pb2.GetTensorsRequest(handles=names, release=is_released)
    arrays: list[Array] = yield Download(request, num_bytes, progress=progress)
    return arrays


def get_into(
    handles: Sequence[TensorHandle],
    places: Sequence[Array | GpuArray],
    progress: Progress | None = None,
    *,
    release: bool,
) -> Operation[None]:
    """Reads stored arrays into arrays of the same dtypes and shapes, and then deletes them if `release`.

    The server writes to memory of its GPU itself.
    """
    on_gpu = [place for place in places if isinstance(place, GpuArray) and place.nbytes]
    if on_gpu and len(on_gpu) == len(places):
        if progress is not None:
            progress.receives(sum(place.nbytes for place in on_gpu))
        contents = Contents(is_written=True)
        request = messages_pb2.ReadTensorsRequest(
            handles=[each.handle for each in handles],
            release=as_flag(release, Argument("release")),
            into=contents.tensors(on_gpu),
        )
        call = Unary("TensorService", "ReadTensors", WithContents(request, contents))
        reply: Reply | NotCarried = yield Whole(
            call, over_grpc=False, num_bytes=contents.num_bytes, repeat=Repeat.of_read(releases=release)
        )
        if reply is not NOT_CARRIED:
            return
    arrays = yield from get(handles, progress, release=release)
    for place, array in zip(places, arrays, strict=True):
        if isinstance(place, GpuArray):
            place.fill(array)
        else:
            np.copyto(place, array)


def delete(handles: Sequence[TensorHandle]) -> Operation[int]:
    """Deletes stored arrays; returns the number that existed."""
    request = messages_pb2.DeleteTensorsRequest(handles=[each.handle for each in handles])
    reply: messages_pb2.DeleteTensorsResponse = yield Unary("TensorService", "DeleteTensors", request)
    return reply.num_deleted


def list_stored() -> Operation[list[TensorHandle]]:
    """Lists all stored arrays."""
    found: list[TensorHandle] = []
    request = messages_pb2.ListTensorsRequest()
    while True:
        reply: messages_pb2.ListTensorsResponse = yield Unary("TensorService", "ListTensors", request)
        found += [
            TensorHandle(each.handle, to_dtype(each.spec.dtype), tuple(each.spec.shape)) for each in reply.tensors
        ]
        if not reply.next_page_token:
            return found
        request = messages_pb2.ListTensorsRequest(page_token=reply.next_page_token)


def receive_results(
    reply: Reply, tensors: Sequence[tensor_pb2.Tensor], progress: Progress | None = None
) -> Operation[list[Array]]:
    """Returns tensors of a reply as new arrays; fetches those kept on the server and deletes them there."""
    kept = [tensor for tensor in tensors if tensor.handle]
    if not kept and progress is None:
        return arrays_in(reply, tensors)
    clean_up: BeginCleanUp = forget if not kept else (yield CleanUp())
    try:
        if progress is not None:
            progress.receives(sum(math.prod(each.shape) * to_dtype(each.dtype).itemsize for each in tensors))
        if not kept:
            return arrays_in(reply, tensors)
        arrays: list[Array] = yield from get([handle_of(tensor) for tensor in kept], progress, release=True)
    except CallbackError as error:
        yield from delete_quietly([tensor.handle for tensor in kept], error)
        raise
    except (*INTERRUPTIONS, UnavailableError, DeadlineExceededError, InternalError):
        delete_later([tensor.handle for tensor in kept], clean_up)
        raise
    fetched, sent = iter(arrays), iter(arrays_in(reply, [tensor for tensor in tensors if not tensor.handle]))
    return [next(fetched if tensor.handle else sent) for tensor in tensors]


def upload(
    header: messages_pb2.PutTensorsHeader, arrays: Sequence[AnyArray], progress: Progress | None = None
) -> Operation[list[tensor_pb2.Tensor]]:
    """Uploads arrays to the server, from host memory; returns their messages, with handles."""
    on_host = tuple([host_array(array) for array in arrays])
    reply: messages_pb2.PutTensorsResponse = yield Upload(header, on_host, progress=progress)
    return list(reply.tensors)


def delete_later(handles: Sequence[str], clean_up: BeginCleanUp) -> None:
    """Deletes tensors in the background, as the operation that has stored them was interrupted."""
    if handles:
        clean_up(partial(delete_quietly, handles, at_most=_CLEAN_UP_SECONDS))


def delete_quietly(
    handles: Sequence[str], because: GradserveError | None = None, *, at_most: float = math.inf
) -> Operation[None]:
    """Deletes tensors that are no longer needed. If the server cannot be reached, they end with their lease.

    Args:
        handles: The handles of the tensors; nothing is sent if there are none.
        because: The error that made them useless, if there was one; a failure is noted on it.
        at_most: The seconds that this may take, if they are fewer than the client's timeout.
    """
    if not handles:
        return
    try:
        request = messages_pb2.DeleteTensorsRequest(handles=handles)
        yield Unary("TensorService", "DeleteTensors", request, at_most=at_most)
    except GradserveError as error:
        if because is not None:
            because.add_note(f"and what was uploaded stays on the server until its lease ends: {error}")


def encode_lease(lease: float) -> Duration:
    """Returns a lease in seconds as a message.

    Raises:
        InvalidArgumentError: It is not a number that can be sent.
    """
    seconds = as_number(lease, Argument("lease"))
    try:
        return encode_duration(seconds)
    except (OverflowError, ValueError):
        raise InvalidArgumentError(f"expected a finite lease in seconds, got {lease}", field="lease") from None


def handle_of(tensor: tensor_pb2.Tensor) -> TensorHandle:
    """Returns the handle in a reply."""
    return TensorHandle(tensor.handle, to_dtype(tensor.dtype), tuple(tensor.shape))


def arrays_in(reply: Reply, tensors: Iterable[tensor_pb2.Tensor]) -> list[Array]:
    """Returns tensors that came with a reply as new arrays.

    Raises:
        InternalError: The reply does not follow the protos.
    """
    arrays = []
    for tensor in tensors:
        if tensor.WhichOneof("data") == "payload_offset":
            if tensor.payload_offset in reply.arrays:
                arrays.append(reply.arrays[tensor.payload_offset])
                continue
            if 0 not in tensor.shape:
                raise InternalError(f"the server sent a tensor without its elements, at {tensor.payload_offset}")
        array = np.empty(tuple(tensor.shape), to_dtype(tensor.dtype))
        buffer_of(array)[:] = tensor.content
        arrays.append(array)
    return arrays


def header_of(arrays: Sequence[AnyArray], lease: float | None, device: str) -> messages_pb2.PutTensorsHeader:
    """Returns the header of a stream of arrays for a device, which live for `lease` seconds without use."""
    header = messages_pb2.PutTensorsHeader(
        tensors=[tensor_pb2.TensorSpec(dtype=to_data_type(array.dtype), shape=array.shape) for array in arrays],
        device=device,
        receipt=new_receipt(),
    )
    if lease is not None:
        header.lease.CopyFrom(encode_lease(lease))
    return header


def _lease_of(header: messages_pb2.PutTensorsHeader) -> Duration | None:
    return header.lease if header.HasField("lease") else None


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
        header = header_of(arrays, None, device)
        header.for_next_call = released
        uploaded = yield from upload(header, arrays, progress)
        message = request(uploaded)
        renew_receipt(message)  # that of an earlier attempt may be void
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

    Without `keep`, they come with the reply if they are small, and are fetched otherwise. The receipt is a new one.

    Raises:
        InvalidArgumentError: `keep` is not a flag, or the lease is not a number that can be sent.
    """
    is_kept = as_flag(keep, Argument("keep"))
    mode = tensor_pb2.Placement.MODE_KEEP if is_kept else tensor_pb2.Placement.MODE_AUTO
    return tensor_pb2.Placement(mode=mode, lease=None if lease is None else encode_lease(lease), receipt=new_receipt())


def listed(value: Any) -> list[Any]:
    """Returns a list unchanged, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]
