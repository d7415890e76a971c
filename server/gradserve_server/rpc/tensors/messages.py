"""Tensors in messages: tensors of requests, handles and specs of replies."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, cast

import numpy as np

from gradserve_protocol.frames import aligned
from gradserve_protocol.tensors import to_data_type, to_dtype
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_ARRAY_DIMENSIONS, MAX_NETWORK_PARTS, check_count
from gradserve_server.security.identity import ANONYMOUS, Identity
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
