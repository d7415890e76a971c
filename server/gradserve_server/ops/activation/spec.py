"""The supported activation functions, which are TensorFlow's in tf.nn.

x is the input, y the result and dy the gradient with respect to it. Each function works element by element.

    name         y                                     gradient with respect to x
    relu         max(x, 0)                             dy where y > 0, else 0
    relu6        min(max(x, 0), 6)                     dy where 0 < y < 6, else 0
    tanh         tanh(x)                               dy (1 - y^2)
    sigmoid      s(x) = 1 / (1 + e^-x)                 dy y (1 - y)
    elu          x, for x < 0 e^x - 1                  dy, for y < 0 dy (y + 1)
    selu         L x, for x < 0 L A (e^x - 1)          dy L, for y < 0 dy (y + L A)
    softplus     log(1 + e^x)                          dy s(x)
    softsign     x / (1 + |x|)                         dy / (1 + |x|)^2
    leaky_relu   x where x > 0, else 0.2 x             dy where x > 0, else 0.2 dy
    gelu         x F(x), F(x) = (1 + erf(x / 2^.5)) / 2   dy (F(x) + x e^(-x^2 / 2) / (2 pi)^.5)
    swish        x s(x)                                dy s(x) (1 + x (1 - s(x)))

At infinities y and the gradient are the limits; TensorFlow's softsign, gelu and swish give NaN at some of them. NaN
stays NaN.
"""

from typing import Protocol

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.operation import Family

FLOAT32_ELEMENTS, FLOAT16_ELEMENTS, BFLOAT16_ELEMENTS = range(3)
"""Codes that tell float32 kernels on the host how the elements of their arrays are stored."""

NAMES = (
    "relu",
    "relu6",
    "tanh",
    "sigmoid",
    "elu",
    "selu",
    "softplus",
    "softsign",
    "leaky_relu",
    "gelu",
    "swish",
)

LEAKY_RELU_SLOPE = 0.2
SELU_SCALE = 1.0507009873554805
"""L. Both L and A are from Klambauer et al., "Self-Normalizing Neural Networks", 2017."""
SELU_SCALE_ALPHA = 1.7580993408473769
"""L A."""

_WITH_GRADIENTS_OF_RESULTS = frozenset({"relu", "relu6", "tanh", "sigmoid", "elu", "selu"})


def gradient_of_result(name: str) -> bool:
    """True if the gradient is a function of the result, y; otherwise it is a function of the input, x."""
    return name in _WITH_GRADIENTS_OF_RESULTS


def check_activation(name: str) -> None:
    """Checks the name of an activation function.

    Raises:
        InvalidArgumentError: The function is not supported; the message lists the supported ones.
    """
    if name not in NAMES:
        known = ", ".join(f'"{known}"' for known in NAMES)
        raise InvalidArgumentError(f'activation_fn must be one of {known}, got "{name}"', field="activation_fn")


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
