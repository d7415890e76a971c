"""Records what PyTorch's layer_norm and its gradient compute on the CPU: writes layer_norm.npz beside this file.

For the environment that this runs in see make_cudnn_rnn.py.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.golden.seeded_inputs import layer_norm_inputs

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
WIDE = ("float32", "float64")
OUTPUTS = ("y", "mean", "rstd", "x_backprop", "scale_backprop", "offset_backprop")


@dataclass(frozen=True)
class Call:
    """A call of both ops.

    Attributes:
        shape: Of x.
        scale_shape: Of scale.
        epsilon: Added to the variance.
        centre: About the mean of x.
        dtypes: Those that have the numbers of x.
    """

    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    epsilon: float = 1e-5
    centre: float = 0.0
    dtypes: tuple[str, ...] = tuple(DTYPES)


CALLS = {
    "ordinary": Call((4, 8), (8,)),
    "odd": Call((3, 5, 7), (7,)),
    "two_dimensions": Call((5, 3, 6), (3, 6)),
    "three_dimensions": Call((2, 3, 4, 5), (3, 4, 5)),
    "one_group": Call((9,), (9,)),
    "one_group_of_two_dimensions": Call((3, 5), (3, 5)),
    "one_element": Call((1,), (1,)),
    "groups_of_one_element": Call((6, 1), (1,)),
    "many_groups": Call((130, 3), (3,)),
    "long_groups": Call((2, 1029), (1029,)),
    "large_epsilon": Call((3, 17), (17,), epsilon=0.5),
    "no_epsilon": Call((3, 17), (17,), epsilon=0.0),
    "large_offset": Call((4, 33), (33,), centre=1000.0, dtypes=WIDE),
    "no_groups": Call((0, 4), (4,)),
    "no_groups_of_two_dimensions": Call((2, 0, 3, 4), (3, 4)),
    "no_elements": Call((2, 3, 0), (0,)),
    "nothing": Call((0, 0), (0,)),
}


def run(call: Call, drawn: dict[str, NDArray[Any]], dtype: str) -> dict[str, NDArray[Any]]:
    """Returns the outputs of both ops."""
    own, param = DTYPES[dtype], DTYPES["float64" if dtype == "float64" else "float32"]
    x, y_backprop = (torch.tensor(drawn[name], dtype=own) for name in ("x", "y_backprop"))
    scale, offset = (torch.tensor(drawn[name], dtype=param) for name in ("scale", "offset"))
    y, mean, rstd = torch.ops.aten.native_layer_norm(x, call.scale_shape, scale, offset, call.epsilon)
    gradients = torch.ops.aten.native_layer_norm_backward(
        y_backprop, x, call.scale_shape, mean, rstd, scale, offset, [True, True, True]
    )
    # PyTorch keeps the normalized dimensions, with length 1.
    stats_shape = call.shape[: len(call.shape) - len(call.scale_shape)]
    outputs = (y, mean.reshape(stats_shape), rstd.reshape(stats_shape), *gradients)
    return {name: as_array(tensor) for name, tensor in zip(OUTPUTS, outputs, strict=True)}


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns the elements, those of 16 bits as uint16."""
    bits = tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor
    array: NDArray[Any] = bits.numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array


def main() -> None:
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = []
    numbers: dict[str, list[NDArray[Any]]] = {"uint16": [], "float32": [], "float64": []}
    for index, (name, call) in enumerate(CALLS.items()):
        seed = 2016 + index
        drawn = layer_norm_inputs(seed, call.shape, call.scale_shape, call.centre)
        crc32 = zlib.crc32(b"".join(array.tobytes() for array in drawn.values()))
        entries.append({"name": name, "seed": seed, "inputs_crc32": crc32} | asdict(call))
        for dtype in call.dtypes:
            for array in run(call, drawn, dtype).values():
                numbers[array.dtype.name].append(array.ravel())
    manifest = json.dumps({"torch": torch.__version__, "numpy": np.__version__, "cases": entries})
    stored: dict[str, Any] = {kind: np.concatenate(arrays) for kind, arrays in numbers.items()}
    np.savez_compressed(Path(__file__).with_name("layer_norm.npz"), manifest=manifest, **stored)


if __name__ == "__main__":
    main()
