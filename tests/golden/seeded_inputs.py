"""Inputs of the recorded calls, made again from a seed.

Imported by the scripts that run TensorFlow and PyTorch, so it needs nothing but NumPy and ml_dtypes.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
"""By name: every T. U is float64 when T is, else float32."""


def param_dtype(dtype: str) -> np.dtype[Any]:
    """Returns U for a T."""
    return DTYPES["float64" if dtype == "float64" else "float32"]


def channel_axis(data_format: str) -> int:
    return -1 if data_format.endswith("C") else 1


def batch_norm_inputs(
    seed: int, shape: tuple[int, ...], dtype: str, data_format: str, centre: float
) -> dict[str, NDArray[Any]]:
    """Returns x, y_backprop, scale, offset, mean and variance; x and mean are near `centre`.

    The same numbers on every machine and with every version of NumPy: RandomState is frozen, and multiples of 2^-20
    hide the last bit in which mathematical libraries differ.
    """
    random = np.random.RandomState(seed)
    channels = (shape[channel_axis(data_format)],)

    def normal(shape: tuple[int, ...]) -> NDArray[np.float64]:
        return np.round(random.standard_normal(shape) * 2**20) / 2**20

    # Sums over y_backprop should not nearly cancel: their error is measured relative to them.
    images = {"x": centre + normal(shape), "y_backprop": 0.5 + normal(shape)}
    params = {
        "scale": 1 + normal(channels) / 2,
        "offset": normal(channels),
        "mean": centre + normal(channels),
        "variance": 0.25 + normal(channels) ** 2,
    }
    # Not from float64 to 16 bits at once: some versions of ml_dtypes round twice, others do not.
    through = np.float64 if dtype == "float64" else np.float32
    return {name: array.astype(through).astype(DTYPES[dtype]) for name, array in images.items()} | {
        name: array.astype(param_dtype(dtype)) for name, array in params.items()
    }


def cudnn_rnn_inputs(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float64]]:
    """Returns arrays of these shapes, by name, whose elements are the same number in every dtype.

    They are multiples of 1/64 from -1 to 1; of 1/128 from -0.5 to 0.5 for "params"; and of 1/64 from -0.75 to 1.25 for
    gradients, so that sums over them do not nearly cancel. bfloat16 has that many bits.
    """
    random = np.random.RandomState(seed)
    arrays = {}
    for name, shape in shapes.items():
        arrays[name] = random.randint(-64, 65, shape) / (128 if name == "params" else 64)
        if name.endswith("_backprop"):
            arrays[name] += 0.25
    return arrays


def layer_norm_inputs(
    seed: int, shape: tuple[int, ...], scale_shape: tuple[int, ...], centre: float
) -> dict[str, NDArray[np.float64]]:
    """Returns x, scale, offset and y_backprop, whose elements are the same number in every dtype.

    They are multiples of 1/64 from -1 to 1, which bfloat16 has; x from centre - 1 to centre + 1, scale from 0.25 to
    1.75, and y_backprop from -0.75 to 1.25, so that sums over it do not nearly cancel.
    """
    random = np.random.RandomState(seed)

    def numbers(shape: tuple[int, ...], largest: int = 64) -> NDArray[np.float64]:
        return random.randint(-largest, largest + 1, shape) / 64

    return {
        "x": centre + numbers(shape),
        "scale": 1 + numbers(scale_shape, 48),
        "offset": numbers(scale_shape),
        "y_backprop": 0.25 + numbers(shape),
    }
