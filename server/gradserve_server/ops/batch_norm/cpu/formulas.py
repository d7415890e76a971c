"""Formulas of the host's kernels, for one channel or one element. See `kernels`."""

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
def gradient_factors(dot: Any, variance: Any, scale: Any, epsilon: Any, count: Any) -> Any:
    """Returns the factors of dy - mean(dy) and of x - mean in x_backprop; `dot` is the sum of dy (x - mean)."""
    inverse_deviation = 1 / np.sqrt(variance + epsilon)
    factor = scale * inverse_deviation
    return factor, factor * inverse_deviation * inverse_deviation * (dot / count)


@register_jitable
def scale_gradient(dot: Any, variance: Any, epsilon: Any) -> Any:
    """Returns scale_backprop; `dot` is the sum of dy (x - mean)."""
    return dot / np.sqrt(variance + epsilon)
