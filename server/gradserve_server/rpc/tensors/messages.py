"""Tensors in messages: references of requests, handles and specs of replies."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradserve_protocol.frames import aligned
from gradserve_protocol.tensors import to_data_type, to_dtype
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_ARRAY_DIMENSIONS, check_count
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.references import Inline, Malformed, Payload, Reference, Stored
from gradserve_server.tensors.spec import TensorSpec


def decode_spec(data_type: tensor_pb2.DataType, shape: Sequence[int], field: str) -> TensorSpec:
    """Reads the dtype and shape of a tensor.

    Raises:
        InvalidArgumentError: No tensor can have them.
    """
    try:
        dtype = to_dtype(data_type)
    except ValueError as error:
        raise InvalidArgumentError(str(error), field=f"{field}.dtype") from None
    check_count(shape, MAX_ARRAY_DIMENSIONS, "dimensions", f"{field}.shape")
    sizes = tuple(shape)
    for size in sizes:
        if size < 0:
            raise InvalidArgumentError(f"expected dimensions of at least 0, got {size}", field=f"{field}.shape")
    # NumPy multiplies the nonzero sizes, so even an empty tensor can overflow.
    if math.prod(size or 1 for size in sizes) * dtype.itemsize >= 1 << 63:
        raise InvalidArgumentError(
            f"expected less than 2^63 bytes, got shape {list(sizes)} of {dtype}", field=f"{field}.shape"
        )
    return TensorSpec(dtype, sizes)


def decode_reference(tensor: tensor_pb2.Tensor, payload: Payload, user: Identity = ANONYMOUS) -> Reference:
    """Returns the reference of a tensor in a request. Errors in its description are raised when it is opened.

    Args:
        tensor: The message of the tensor.
        payload: The payload beside the request.
        user: The caller, who can only refer to tensors within reach.
    """
    data = tensor.WhichOneof("data")
    if data == "handle":
        return Stored(tensor.handle, _described(tensor) if tensor.dtype else None, user)
    if data is None:
        return Malformed("expected content or a handle, got neither")
    spec = _described(tensor)
    if isinstance(spec, Malformed):
        return spec
    if data == "payload_offset":
        return payload.reference(spec, tensor.payload_offset)
    content = tensor.content
    if len(content) != spec.num_bytes:
        return Malformed(
            f"expected {spec.num_bytes} bytes for shape {list(spec.shape)} of {spec.dtype}, got {len(content)}",
            ".content",
        )
    return Inline(np.frombuffer(content, spec.dtype).reshape(spec.shape))


def _described(tensor: tensor_pb2.Tensor) -> TensorSpec | Malformed:
    try:
        return decode_spec(tensor.dtype, tensor.shape, "")
    except InvalidArgumentError as error:
        return Malformed(error.message, error.field or "")


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
