"""Inputs of the recorded cases of the batch_norm layer, made again from a seed.

Imported by the script that runs TensorFlow, so it needs nothing but what comes with that.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tests.golden.seeded_inputs import DTYPES, param_dtype

Shape = tuple[int, ...]
Weights = Literal["positive", "with zeros", "all zero", "integers", "wider", "equal"]
AdjustmentShape = Literal["scalar", "channels", "ones and channels", "items", "full"]

RECORDED_UPDATES = (0, 1, 2, 10)
"""Variables are recorded after so many updates."""


@dataclass(frozen=True)
class LayerInputs:
    """What one call of the layer gets, and the gradient of a loss with respect to its output.

    Attributes:
        x: Of the case's dtype and shape.
        dy: Like x.
        batch_weights: [N], or None.
        adjustment: The scale and the bias, in float64 for float64 and in float32 for others; broadcast to x. Or None.
    """

    x: NDArray[Any]
    dy: NDArray[Any]
    batch_weights: NDArray[Any] | None
    adjustment: tuple[NDArray[Any], NDArray[Any]] | None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All that there are, in the order of the attributes."""
        weights = () if self.batch_weights is None else (self.batch_weights,)
        return (self.x, self.dy, *weights, *(self.adjustment or ()))


@dataclass(frozen=True)
class LayerCall:
    """A layer, and the kind of calls that it gets.

    Attributes:
        name: Says which implementation runs, or what is special.
        seed: Of its inputs.
        shape: Of x.
        dtype: Of x.
        arguments: Of the layer, but for `param_initializers`. A regularizer is plain data: its name and arguments.
        initialised: Which variables get values of their own; the others start as TensorFlow's do.
        is_training: Of the first call. If so, ten updates follow, and then one call that is not.
        batch_weights: Which numbers they are; None if there are none.
        adjustment: The shape of scale and bias; None if there are none.
    """

    name: str
    seed: int
    shape: Shape
    dtype: str
    arguments: Mapping[str, Any]
    initialised: tuple[str, ...]
    is_training: bool
    batch_weights: Weights | None
    adjustment: AdjustmentShape | None

    def __str__(self) -> str:
        return self.name

    @property
    def axis(self) -> int:
        """The axis of channels."""
        return 1 if self.arguments.get("data_format") == "NCHW" else len(self.shape) - 1

    @property
    def updates(self) -> int:
        """How many times the variables are updated."""
        return RECORDED_UPDATES[-1] if self.is_training else 0


def layer_arguments(call: LayerCall) -> dict[str, Any]:
    """Returns the arguments of the layer: arrays as initializers, plain data as regularizers."""
    return dict(call.arguments) | ({"param_initializers": _initializers(call)} if call.initialised else {})


def layer_inputs(call: LayerCall) -> tuple[LayerInputs, ...]:
    """Returns the inputs of the first call and, in training, of the nine that follow it.

    The same numbers on every machine and with every version of NumPy: RandomState is frozen, and multiples of 2^-20
    hide the last bit in which mathematical libraries differ.
    """
    random = np.random.RandomState(call.seed)
    return tuple(_draw(random, call) for _ in range(max(call.updates, 1)))


def inputs_crc32(call: LayerCall) -> int:
    """Returns the checksum of all inputs of a case, initial values included."""
    arrays = [*_initializers(call).values(), *(array for step in layer_inputs(call) for array in step.arrays)]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))


def _draw(random: np.random.RandomState, call: LayerCall) -> LayerInputs:
    x, dy = _normal(random, call.shape), _normal(random, call.shape)
    # Not from float64 to 16 bits at once: some versions of ml_dtypes round twice, others do not.
    through = np.float64 if call.dtype == "float64" else np.float32
    dtype = DTYPES[call.dtype]
    # Sums over dy should not nearly cancel: their error is measured relative to them.
    return LayerInputs(
        x=(0.5 + x).astype(through).astype(dtype),
        dy=(0.5 + dy).astype(through).astype(dtype),
        batch_weights=None if call.batch_weights is None else _weights(random, call),
        adjustment=None if call.adjustment is None else _adjustment(random, call),
    )


def _initializers(call: LayerCall) -> dict[str, NDArray[Any]]:
    """Returns multiples of 1/16 below 16: every dtype has these."""
    random = np.random.RandomState(call.seed ^ 1)
    channels = (call.shape[call.axis],)
    drawn = {
        "beta": _normal(random, channels),
        "gamma": 1 + _normal(random, channels) / 2,
        "moving_mean": 0.5 + _normal(random, channels),
        "moving_variance": 0.25 + _normal(random, channels) ** 2,
    }
    dtype = param_dtype(call.dtype)
    return {name: (np.round(drawn[name] * 16) / 16).astype(dtype) for name in call.initialised}


def _weights(random: np.random.RandomState, call: LayerCall) -> NDArray[Any]:
    items = call.shape[0]
    drawn = random.randint(1, 33, items) / 16
    dtype = DTYPES[call.dtype]
    if call.batch_weights == "with zeros":
        drawn[::3] = 0
    elif call.batch_weights == "all zero":
        drawn[:] = 0
    elif call.batch_weights == "equal":
        drawn[:] = 0.25
    elif call.batch_weights == "integers":
        return random.randint(0, 4, items).astype(np.int32)
    elif call.batch_weights == "wider":
        dtype = np.dtype(np.float64 if call.dtype == "float32" else np.float32)
    return drawn.astype(dtype)


def _adjustment(random: np.random.RandomState, call: LayerCall) -> tuple[NDArray[Any], NDArray[Any]]:
    ones = [1] * len(call.shape)
    channels = call.shape[call.axis]
    shapes: dict[AdjustmentShape, Shape] = {
        "scalar": (),
        "channels": (channels,),
        "ones and channels": (*ones[: call.axis], channels, *ones[call.axis + 1 :]),
        "items": (call.shape[0], *ones[1:]),
        "full": call.shape,
    }
    assert call.adjustment is not None
    shape = shapes[call.adjustment]
    dtype = param_dtype(call.dtype)
    scale, bias = 1 + _normal(random, shape) / 4, _normal(random, shape) / 4
    return np.asarray(scale, dtype), np.asarray(bias, dtype)


def _normal(random: np.random.RandomState, shape: Shape) -> NDArray[np.float64]:
    return np.asarray(np.round(random.standard_normal(shape) * 2**20) / 2**20)
