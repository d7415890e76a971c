"""Contents that leave the memory of a device while the reply is being sent."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gradserve.v1 import tensor_pb2
from gradserve.wire.frames import aligned
from gradserve.wire.tensors import to_data_type
from gradserve_server.devices.device import Array


@dataclass
class StreamedContents:
    """The payload beside one message: all tensors, none of which is on the host yet.

    Attributes:
        arrays: The arrays that have contents, in the order of the payload.
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
