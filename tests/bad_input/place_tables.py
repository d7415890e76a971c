"""Tensors that say of themselves that they are where they are not."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from tests.bad_input.requests import DENSE, VALUES, Bad, bad_gradient, dense, sparse

PAYLOAD_BYTES = 128


@dataclass(frozen=True)
class Lie:
    """A request that comes with PAYLOAD_BYTES of payload.

    Attributes:
        name: What is wrong with it.
        bad: The request.
    """

    name: str
    bad: Bad


def at(offset: int, shape: list[int], dtype: Any = np.float32) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=to_data_type(np.dtype(dtype)), shape=shape, payload_offset=offset)


def beyond(num_bytes: int, offset: int) -> str:
    return (
        f"expected {num_bytes} bytes within one segment of the payload, got an offset of {offset} "
        f"where the segment ends at {PAYLOAD_BYTES}"
    )


def store(message: str, index: int, *tensors: tensor_pb2.Tensor) -> Bad:
    request = tensor_messages_pb2.StoreTensorsRequest(tensors=tensors)
    return Bad("StoreTensors", request, message, f"tensors[{index}].payload_offset")


OVERLAP = "expected tensors that do not overlap in the payload"
PLACES: dict[str, tuple[tensor_pb2.Tensor, str]] = {
    "misaligned": (at(4, [2, 3]), "expected a multiple of 64, got 4"),
    "more elements than bytes": (at(0, [11, 3]), beyond(132, 0)),
    "elements larger than the bytes": (at(0, [6, 3], np.float64), beyond(144, 0)),
    "from within beyond the end": (at(64, [6, 3]), beyond(72, 64)),
    "at the end": (at(128, [1, 3]), beyond(12, 128)),
    "beyond the end": (at(1 << 40, [1, 3]), beyond(12, 1 << 40)),
    "at the end of the address space": (at((1 << 64) - 64, [1, 3]), beyond(12, (1 << 64) - 64)),
    "a terabyte": (at(0, [1 << 40, 3]), beyond(3 << 42, 0)),
}
LIES = [
    *(
        Lie(f"{name}, of a gradient", bad)
        for name, (tensor, message) in PLACES.items()
        for bad in bad_gradient("matrix", message, f"{DENSE}.payload_offset", dense(tensor))
    ),
    *(Lie(f"{name}, of a tensor", store(message, 0, tensor)) for name, (tensor, message) in PLACES.items()),
    *(
        Lie("values over indices", bad)
        for bad in bad_gradient(
            "any rows", OVERLAP, f"{VALUES}.payload_offset", sparse(at(0, [1], np.int64), at(0, [1, 3]))
        )
    ),
    *(
        Lie("a component over another", bad)
        for bad in bad_gradient(
            "model",
            OVERLAP,
            "gradient[1].sparse.values.payload_offset",
            dense(at(0, [2]), "w"),
            sparse(at(64, [1], np.int64), at(0, [1, 2]), name="e"),
        )
    ),
    Lie("a tensor twice", store(OVERLAP, 1, at(64, [4]), at(64, [4]))),
    Lie("a tensor within another", store(OVERLAP, 1, at(0, [32]), at(64, [1]))),
]
