"""Formulas of the host's kernels, for one channel or one element. See `kernels`."""

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.activations import INLINED, number_like


@register_jitable(**INLINED)
def normalized(difference: Any, multiplier: Any, offset: Any) -> Any:
    """Returns y of the forward call; `difference` is x - mean.

    The gradient computes it again if there is a relu; the same arithmetic gives the same bits.
    """
    return difference * multiplier + offset


@register_jitable(**INLINED)
def relu(y: Any) -> Any:
    """Returns the larger of y and 0, NaN for NaN."""
    return number_like(y, 0) if y <= 0 else y


@register_jitable(**INLINED)
def relu_gradient(dy: Any, y: Any) -> Any:
    """Returns the gradient with respect to y, given the gradient with respect to relu(y)."""
    return dy if y > 0 else number_like(dy, 0)


@register_jitable
def forward_multiplier(variance: Any, scale: Any, epsilon: Any) -> Any:
    """Returns the factor of x - mean in y."""
    return scale / np.sqrt(variance + epsilon)


@register_jitable
def inverse_deviation(variance: Any, epsilon: Any) -> Any:
    """Returns 1 / sqrt(variance + epsilon), float64."""
    return 1 / np.sqrt(variance + epsilon)


@register_jitable
def power_of_two(inverse: Any) -> Any:
    """Returns a power of two that is about as large as the inverse of a deviation.

    Differences from the mean are multiplied by it before they are by dy, so the products have about the range of dy.
    A power of two costs them no digits.
    """
    return math.ldexp(1.0, math.frexp(inverse)[1]) if np.isfinite(inverse) else 1.0


@register_jitable(**INLINED)
def input_gradient(dy: Any, difference: Any, mean_of_dy: Any, slope: Any, factor: Any) -> Any:
    """Returns x_backprop in training.

    The factor comes last: multiplied into the slope, it could leave the range of float32 where the result does not.

    Args:
        dy: The gradient with respect to y.
        difference: x - mean.
        mean_of_dy: The mean of dy.
        slope: scale_backprop / count / sqrt(variance + epsilon).
        factor: scale / sqrt(variance + epsilon).
    """
    return (dy - mean_of_dy - difference * slope) * factor
