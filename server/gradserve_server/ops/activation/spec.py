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

NORMAL_TAIL_SHIFT = 5.0

NORMAL_TAIL_LARGEST = 38.0
"""The a for which e^(-a^2 / 2) is just above the least normal number."""

NORMAL_TAIL_FLOAT32 = (
    0.0003829018183024107,
    -0.001020416970195398,
    -0.0029831861768943525,
    0.020893542181199893,
    -0.06910409896639616,
    0.1650050060116485,
    -0.31353552641153054,
    0.49530647285148677,
    -0.6653824305737333,
    0.7691930414454985,
)
NORMAL_TAIL_FLOAT64 = (
    2.224938767716443e-09,
    7.630410417873182e-09,
    -1.0618274174239376e-08,
    -6.667529339227571e-08,
    4.375841598285575e-08,
    4.3443907263764586e-07,
    -3.374965203524632e-07,
    -2.7703209441469523e-06,
    3.981182741532577e-06,
    1.668170360977268e-05,
    -4.9762853165030135e-05,
    -5.937586616736071e-05,
    0.000544899062695852,
    -0.0007978693748911934,
    -0.002993376769094473,
    0.020795066797569855,
    -0.06911863870647982,
    0.1650203661705007,
    -0.3135331566712971,
    0.49530561596997413,
    -0.6653825028900567,
    0.769193049750063,
)
"""Coefficients for the tail of the normal distribution, F(-a) = erfc(a / 2^.5) / 2 for a >= 0.

e^(a^2 / 2) F(-a) = P(t) / (a + SHIFT) with t = (a - SHIFT) / (a + SHIFT), which brings all a >= 0 to -1 <= t < 1, where
P changes little and slowly (after Shepherd and Laframboise, "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x in
0 <= x < infinity", 1981). These are the coefficients of P, the highest power first: Chebyshev interpolations, computed
with 40 digits. Relative errors are below 2e-8 for float32 and 4e-17 for float64. erf would lose all digits of the tail
in 1 + erf.
"""

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
