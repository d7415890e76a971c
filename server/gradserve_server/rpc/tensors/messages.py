"""Tensors in messages: decoded from requests, and delivered with replies as the request wants."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, Self, cast

import numpy as np
from google.protobuf.message import Message

from gradserve_protocol.arrays import HOST_ARRAYS
from gradserve_protocol.frames import aligned
from gradserve_protocol.tensors import Contents, WithContents, to_data_type, to_dtype
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.devices.compute import FEW_PIECES, Compute
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError, request_fields
from gradserve_server.limits import MAX_ARRAY_DIMENSIONS, MAX_NETWORK_PARTS, check_count
from gradserve_server.resources.memory import Memory, Room
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import decode_duration
from gradserve_server.rpc.boundary.messages import Piece, assembled
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.held import Residence, check_receipt
from gradserve_server.tensors.incoming import (
    IncomingTensor,
    IncomingTensors,
    Inline,
    Malformed,
    Stored,
    tensors_in,
)
from gradserve_server.tensors.payload import Payload
from gradserve_server.tensors.spec import Fault, TensorSpec
from gradserve_server.tensors.store import TensorStore

_DTYPES: dict[int, np.dtype[Any]] = {code: to_dtype(code) for code in tensor_pb2.DataType.values() if code}


def decode_spec(data_type: tensor_pb2.DataType, shape: Sequence[int], field: str) -> TensorSpec:
    """Reads the dtype and shape of a tensor.

    Raises:
        InvalidArgumentError: No tensor can have them.
    """
    spec = _described(data_type, shape)
    if isinstance(spec, Fault):
        raise InvalidArgumentError(spec.message, field=field + spec.field)
    return spec


def _described(data_type: tensor_pb2.DataType, shape: Sequence[int]) -> TensorSpec | Fault:
    dtype = _DTYPES.get(data_type)
    if dtype is None:
        return Fault(f"expected a known DataType, got {data_type}", ".dtype")
    if len(shape) > MAX_ARRAY_DIMENSIONS:  # before anything copies them: there may be a million
        return Fault(f"expected at most {MAX_ARRAY_DIMENSIONS} dimensions, got {len(shape)}", ".shape")
    sizes = tuple(shape)
    num_bytes = dtype.itemsize
    for size in sizes:
        if size < 0:
            return Fault(f"expected dimensions of at least 0, got {size}", ".shape")
        num_bytes *= size or 1  # NumPy multiplies the nonzero sizes, so even an empty tensor can overflow
    if num_bytes >= 1 << 63:
        return Fault(f"expected less than 2^63 bytes, got shape {list(sizes)} of {dtype}", ".shape")
    return TensorSpec(dtype, sizes)


def decode_tensors(
    described: Sequence[tuple[str, tensor_pb2.Tensor]], payload: Payload, user: Identity = ANONYMOUS
) -> IncomingTensors:
    """Returns tensors of a request. Errors in a description are raised when the tensor is needed.

    Args:
        described: The field of each tensor in the request, and its message.
        payload: The payload beside the request.
        user: The caller, who can only refer to tensors within reach.
    """
    tensors: list[IncomingTensor | None] = []
    beside: list[tuple[str, TensorSpec, int]] = []
    for path, message in described:
        data = message.WhichOneof("data")
        spec = _described(message.dtype, message.shape)
        if data == "handle":
            if isinstance(spec, TensorSpec):
                tensors.append(Stored(path, message.handle, spec))
            else:  # without a dtype, there is no description
                tensors.append(Stored(path, message.handle, fault=spec if message.dtype else None))
        elif data is None:
            tensors.append(Malformed(path, fault=Fault("expected content or a handle, got neither")))
        elif isinstance(spec, Fault):
            tensors.append(Malformed(path, fault=spec))
        elif data == "payload_offset":
            beside.append((path, spec, message.payload_offset))
            tensors.append(None)
        else:
            tensors.append(_inline(path, spec, message.content))
    if beside:
        found = iter(tensors_in(payload, beside))
        tensors = [next(found) if each is None else each for each in tensors]
    return IncomingTensors(cast("list[IncomingTensor]", tensors), payload, user)


def _inline(field: str, spec: TensorSpec, content: bytes) -> IncomingTensor:
    if len(content) == spec.num_bytes:
        return Inline(field, np.frombuffer(content, spec.dtype).reshape(spec.shape))
    fault = f"expected {spec.num_bytes} bytes for shape {list(spec.shape)} of {spec.dtype}, got {len(content)}"
    return Malformed(field, fault=Fault(fault, ".content"))


def encode_spec(spec: TensorSpec | Array) -> tensor_pb2.TensorSpec:
    """Returns the message of a spec, or of an array's dtype and shape."""
    return tensor_pb2.TensorSpec(dtype=to_data_type(spec.dtype), shape=spec.shape)


def encode_handle(spec: TensorSpec | Array, handle: str) -> tensor_pb2.Tensor:
    """Returns the message of a stored tensor."""
    return tensor_pb2.Tensor(dtype=to_data_type(spec.dtype), shape=spec.shape, handle=handle)


@dataclass
class StreamedContents:
    """The payload beside a message whose tensors leave the memory of a device while the reply is being sent.

    Attributes:
        arrays: The arrays that are not empty, in the order of the payload.
        num_bytes: The length of the payload.
    """

    arrays: list[Array] = field(default_factory=list)
    num_bytes: int = 0

    def tensors(self, arrays: Iterable[Array]) -> list[tensor_pb2.Tensor]:
        """Returns the tensors of arrays, for the message to which these contents belong."""
        return [self._add(array) for array in arrays]

    def _add(self, array: Array) -> tensor_pb2.Tensor:
        dtype = to_data_type(array.dtype)
        if not array.nbytes:
            return tensor_pb2.Tensor(dtype=dtype, shape=array.shape, content=b"")
        offset = aligned(self.num_bytes)
        self.arrays.append(array)
        self.num_bytes = offset + array.nbytes
        return tensor_pb2.Tensor(dtype=dtype, shape=array.shape, payload_offset=offset)


def decode_inputs(request: Any, kind: type[Any], payload: Payload, user: Identity = ANONYMOUS) -> IncomingTensors:
    """Returns the required and given inputs, by name; "weights[1]" for one of a repeated field.

    Raises:
        InvalidArgumentError: There are too many.
    """
    described: list[tuple[str, tensor_pb2.Tensor]] = []
    for each in fields(kind):
        value = getattr(request, each.name)
        if request.DESCRIPTOR.fields_by_name[each.name].is_repeated:
            check_count(value, MAX_NETWORK_PARTS, "tensors", each.name)
            described += [(f"{each.name}[{index}]", tensor) for index, tensor in enumerate(value)]
        elif request.HasField(each.name) or each.default is MISSING:
            described.append((each.name, value))
    return decode_tensors(described, payload, user)


_INLINE, _KEEP, _AUTO = (
    tensor_pb2.Placement.MODE_INLINE,
    tensor_pb2.Placement.MODE_KEEP,
    tensor_pb2.Placement.MODE_AUTO,
)
_MODES = {tensor_pb2.Placement.MODE_UNSPECIFIED: _INLINE, _INLINE: _INLINE, _KEEP: _KEEP, _AUTO: _AUTO}


@dataclass(frozen=True)
class InlineLimits:
    """Limits for inline tensors, in bytes.

    Attributes:
        small: The most bytes inline with MODE_AUTO.
        message: The most bytes inline in any mode.
    """

    small: int
    message: int


@dataclass(frozen=True)
class TensorDeliverer:
    """Begins the delivery of replies' tensors.

    Attributes:
        store: Keeps tensors under handles.
        residence: Copies tensors to the host.
        compute: Encodes replies with many tensors.
        memory: The memory of results.
        limits: The limits of inline tensors.
    """

    store: TensorStore
    residence: Residence
    compute: Compute
    memory: Memory
    limits: InlineLimits

    def begin(self, placement: tensor_pb2.Placement, call: Call) -> "OutgoingTensors":
        """Checks where a request wants the tensors of its reply; returns a context manager that takes them.

        Raises:
            InvalidArgumentError: The mode is unknown, the lease is not positive, or the receipt is too long.
        """
        if placement.mode not in _MODES:
            raise InvalidArgumentError(f"expected a known placement mode, got {placement.mode}", field="placement.mode")
        lease = decode_duration(placement, "lease")
        if lease is not None:
            with request_fields({"lease": "placement.lease"}):
                self.store.lease_seconds(lease)
        receipt = check_receipt(placement.receipt, "placement.receipt")
        return OutgoingTensors(self, _MODES[placement.mode], lease, receipt, call)


class OutgoingTensors:
    """The tensors of one reply. If the block fails or the reply cannot be sent, none of them stays on the server.

    Attributes:
        handles: The handles of those that are kept.
    """

    def __init__(
        self,
        deliverer: TensorDeliverer,
        mode: "tensor_pb2.Placement.Mode",
        lease: float | None,
        receipt: bytes,
        call: Call,
    ) -> None:
        self.handles: list[str] = []
        self._room: Room | None = None
        self._deliverer = deliverer
        self._mode = mode
        self._lease = lease
        self._receipt = receipt
        self._call = call
        self._is_attached = call.carries_results and mode != _KEEP
        self._arrays: list[Array] = []
        self._keeps: bool | None = None

    @property
    def room(self) -> Room:
        """Memory that the call reserves for them. Stored tensors take it over; the rest is freed at the end."""
        if self._room is None:
            self._room = self._deliverer.memory.room_of_call(self._call.identity)
        return self._room

    @property
    def compute(self) -> Compute:
        """Runs what takes long for many tensors."""
        return self._deliverer.compute

    def keeps(self, num_bytes: int) -> bool:
        """Returns True if the tensors stay on the server. The first size, which may be an upper bound, decides for all.

        Raises:
            ResourceExhaustedError: They must come inline and are too large for that.
        """
        if self._keeps is None:
            limits = self._deliverer.limits
            keeps = self._mode == _KEEP or (self._mode == _AUTO and num_bytes > limits.small)
            self._keeps = keeps and not self._is_attached
            if not self._keeps and not self._is_attached and num_bytes > limits.message:
                raise ResourceExhaustedError(
                    f"the result has {num_bytes} bytes, but at most {limits.message} come inline; "
                    "ask for placement MODE_KEEP or MODE_AUTO",
                    field="placement.mode",
                    code="GS_TOO_LARGE",
                )
        return self._keeps

    async def add(self, arrays: Sequence[Array], *, shared: bool = False) -> None:
        """Takes any number of arrays, in any memory; those that leave the server are copied to the host.

        Takes no turn of the event loop unless they are many or have to be copied.

        Args:
            arrays: The arrays.
            shared: Whether their memory is also referenced elsewhere.

        Raises:
            ResourceExhaustedError: They must be kept and do not fit, or come inline and are too large for that.
            MemoryError: There is not enough memory on the host.
        """
        if self.keeps(sum([array.nbytes for array in arrays])):
            owner = self.room.owner
            self.handles += await self._deliverer.store.keep(
                arrays, self._lease, shared=shared, room=self.room, owner=owner, receipt=self._receipt
            )
        elif [array for array in arrays if not isinstance(array, HOST_ARRAYS)]:
            arrays = await self._deliverer.residence.copy_to_host(arrays)
        self._arrays += arrays

    async def reply(
        self,
        response: Message,
        pieces: Callable[[Iterator[tensor_pb2.Tensor]], Iterable[Piece]],
        contents: Contents | None = None,
    ) -> WithContents:
        """Returns the reply with the tensors.

        Args:
            response: A response, without tensors.
            pieces: A function that takes the messages of the tensors, in order, and returns the rest of the response.
                It runs in a thread if they are many.
            contents: Empty contents for the reply.
        """
        contents = Contents() if contents is None else contents
        tensors: Iterator[tensor_pb2.Tensor]
        if self._keeps:
            tensors = map(encode_handle, self._arrays, self.handles)
        else:
            tensors = each_inline(self._arrays, contents, is_attached=self._is_attached)
        message = await assembled(self.compute, len(self._arrays), response, pieces(tensors))
        if self.handles:
            self._call.undelivered.append(partial(self._deliverer.store.delete, self.handles))
        return WithContents(message, contents)

    def __enter__(self) -> Self:
        """Returns the tensors."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Deletes stored tensors after an error; frees the rest of the reserved memory."""
        if error is not None:
            self._deliverer.store.delete(self.handles)
        if self._room is not None:
            self._room.settle()


def each_inline(arrays: Sequence[Array], contents: Contents, *, is_attached: bool) -> Iterator[tensor_pb2.Tensor]:
    """Returns the messages of arrays that leave with a reply, for `assembled`.

    Args:
        arrays: The arrays, in host memory.
        contents: The contents beside the reply.
        is_attached: Whether contents of any size travel beside the reply.
    """
    if len(arrays) <= FEW_PIECES:
        return iter(contents.tensors(arrays))
    # For gRPC, a message with contents beside it could not be serialized in parts.
    return contents.each_tensor(arrays, beside=is_attached)
