"""The derivative of the gradient of a normalization, in PyTorch's own operations."""

from typing import NamedTuple

import torch


class Gradients(NamedTuple):
    """The gradients with respect to the inputs of a normalization's gradient: each of the dtype of its input."""

    dy: torch.Tensor
    x: torch.Tensor
    scale: torch.Tensor


def second_derivative(
    outer: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    axes: tuple[int, ...],
    epsilon: float,
    moments: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Gradients:
    """Returns the gradients of <v, dx> + <a, d_scale> + <b, d_offset>, where dx, d_scale and d_offset are those of y.

        y = xhat scale + offset, xhat = (x - mean) r, r = 1 / sqrt(variance + epsilon)

    With P(g) = r (g - mean(g) - xhat mean(g xhat)), which is its own transpose:

        dx = P(dy scale), d_scale = sum(dy xhat), d_offset = sum(dy)

    It computes in float32, or float64 for float64, from x alone, so that it can be differentiated again.

    Args:
        outer: (v, a, b).
        dy: The gradient with respect to y, of the shape of x.
        x: The input.
        scale: The scale, in a shape that broadcasts with x; a and b have that shape, too.
        axes: The dimensions over which the moments are taken.
        epsilon: Added to the variance.
        moments: The mean and the variance, if they are constants; in a shape that broadcasts with x.
    """
    dtype, scale_dims = x.dtype, tuple(index for index in range(x.dim()) if _is_summed(scale, x, index))
    wide = scale.dtype
    images, output_gradient = x.to(wide), dy.to(wide)
    v, a, b = (each.to(wide) for each in outer)
    if moments is None:
        mean = images.mean(axes, keepdim=True)
        r = (images.var(axes, correction=0, keepdim=True) + epsilon).rsqrt()
    else:
        mean, r = moments[0], (moments[1] + epsilon).rsqrt()
    xhat = (images - mean) * r

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        return values.mean(axes, keepdim=True)

    def projected(gradient: torch.Tensor) -> torch.Tensor:
        if moments is not None:
            return r * gradient
        return r * (gradient - mean_of(gradient) - xhat * mean_of(gradient * xhat))

    g, pv = output_gradient * scale, projected(v)
    of_x = projected(a * output_gradient)
    if moments is None:
        m, n = mean_of(g * xhat), mean_of(v * xhat)
        spread = mean_of(v * g) - mean_of(v) * mean_of(g) - m * n
        of_x = of_x - projected(r * (n * g + m * v)) - r * r * xhat * spread
    of_scale = (output_gradient * pv).sum(scale_dims, keepdim=True) if scale_dims else output_gradient * pv
    return Gradients((scale * pv + a * xhat + b).to(dtype), of_x.to(dtype), of_scale)


def _is_summed(scale: torch.Tensor, x: torch.Tensor, index: int) -> bool:
    """Returns True if the scale has one element in a dimension of x."""
    return bool(scale.shape[index] == 1 and x.shape[index] != 1)
