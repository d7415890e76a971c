"""What computes activation functions on a device."""

from typing import Protocol

from gradserve_server.devices.device import Array
from gradserve_server.ops.operation import Family

FAMILY = "activation"


class Activation(Family, Protocol):
    """The computations on one device, inside its `computing`.

    All arrays of a call are in its memory, C-contiguous, and have the same shape and dtype: float16, bfloat16, float32
    or float64. 16 bits are widened to float32 for the arithmetic, and the result is rounded once. `out` may be one of
    the other arrays itself, but must not overlap them in another way.
    """

    def forward(self, name: str, x: Array, out: Array) -> None:
        """Computes an activation function; `name` is one of `spec.NAMES`.

        Args:
            name: Which.
            x: The input.
            out: Becomes the result. May be `x`.
        """
        ...

    def gradient(self, name: str, dy: Array, saved: Array, out: Array) -> None:
        """Computes the gradient with respect to the input; `name` is one of `spec.NAMES`.

        Args:
            name: Which.
            dy: The gradient with respect to the result.
            saved: The result where `spec.gradient_of_result(name)`, else the input.
            out: Becomes the gradient. May be `dy` or `saved`.
        """
        ...
