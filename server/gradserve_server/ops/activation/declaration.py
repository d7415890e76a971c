"""The interface of activation functions on a device."""

from typing import Protocol

from gradserve_server.devices.device import Array
from gradserve_server.ops.operation import Family

FAMILY = "activation"


class Activation(Family, Protocol):
    """Activation functions on one device, inside its `computing`.

    All arrays of a call are in its memory, C-contiguous, and have the same shape and dtype: float16, bfloat16, float32
    or float64. The arithmetic for 16 bits is in float32, and the result is rounded once. `out` may be one of the other
    arrays, but must not overlap them in another way.
    """

    def forward(self, name: str, x: Array, out: Array) -> None:
        """Computes an activation function; `name` is one of `spec.NAMES`.

        Args:
            name: The name of the function.
            x: The input.
            out: The array for the result. May be `x`.
        """
        ...

    def gradient(self, name: str, dy: Array, saved: Array, out: Array) -> None:
        """Computes the gradient with respect to the input; `name` is one of `spec.NAMES`.

        Args:
            name: The name of the function.
            dy: The gradient with respect to the result.
            saved: The result if `spec.gradient_of_result(name)`, otherwise the input.
            out: The array for the gradient. May be `dy` or `saved`.
        """
        ...
