"""Per-channel values."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.adjustment import ChannelTransform, per_channel
from gradserve_server.layers.batch_norm.spec import channel_axis
from gradserve_server.ops.dtypes import widened


@dataclass(frozen=True)
class Channels:
    """The channels of some inputs.

    Attributes:
        xp: NumPy or CuPy.
        dtype: U, the dtype of arithmetic.
        count: The number of channels, C.
        axis: The axis of the channels, as a negative number.
    """

    xp: Any
    dtype: np.dtype[Any]
    count: int
    axis: int

    @classmethod
    def of(cls, xp: Any, x: Array, data_format: str) -> "Channels":
        """Returns the channels of inputs."""
        axis = channel_axis(len(x.shape), data_format)
        return cls(xp, widened(x.dtype), x.shape[axis], axis - len(x.shape))

    def broadcast(self, array: Array) -> Array:
        """Returns values of shape [C] in a shape that broadcasts to the inputs."""
        return array.reshape(self.count, *[1] * (-self.axis - 1))

    def filled(self, value: int) -> Array:
        """Returns the same value for all channels."""
        return self.xp.full(self.count, value, self.dtype)

    def scales(self, array: Array | None) -> Array:
        """Returns factors as U; ones if there are none."""
        return self.filled(1) if array is None else array.astype(self.dtype, copy=False)

    def offsets(self, array: Array | None) -> Array:
        """Returns summands as U; zeros if there are none."""
        return self.filled(0) if array is None else array.astype(self.dtype, copy=False)

    def transform(
        self, r: Array | None, d: Array | None, scale: Array | None, bias: Array | None
    ) -> ChannelTransform | None:
        """Returns the correction r, d and an adjustment together; None if the adjustment varies within a channel."""
        a = self.filled(1) if scale is None else per_channel(scale.astype(self.dtype), self.count, self.axis)
        b = self.filled(0) if bias is None else per_channel(bias.astype(self.dtype), self.count, self.axis)
        return None if a is None or b is None else ChannelTransform(self.scales(r), self.offsets(d), a, b)
