"""Autograd over ops of a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from gradserve.torch.tensors import tensor_of

Arrays: TypeAlias = Sequence[NDArray[Any] | None]


class Computed(NamedTuple):
    """The result of an op.

    Attributes:
        outputs: What the caller gets; None for outputs that the op does not have in this form.
        residuals: What else the gradient needs.
    """

    outputs: Arrays
    residuals: Arrays


@dataclass(frozen=True)
class ServedOp:
    """An op with its gradient, as calls of a server.

    Attributes:
        forward: Called with the inputs.
        backward: Called with the inputs, the outputs, the residuals, and the gradients with respect to the outputs that
            have one; returns the gradients with respect to the inputs, with None for those that have none.
        num_differentiable: The number of outputs, counted from the first, that have a gradient.
    """

    forward: Callable[..., Computed]
    backward: Callable[..., Arrays]
    num_differentiable: int

    def __call__(self, *inputs: torch.Tensor | None) -> tuple[Any, ...]:
        """Computes the op, for tensors of one device; returns its outputs on that device."""
        outputs: tuple[Any, ...] = _Function.apply(self, *inputs)
        return outputs


class _Function(torch.autograd.Function):
    """The op that is its first argument."""

    @staticmethod
    def forward(ctx: Any, op: ServedOp, *inputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        device = next(each.device for each in inputs if each is not None)
        computed = op.forward(*inputs)
        outputs = _tensors(computed.outputs, device)
        ctx.op, ctx.device = op, device
        ctx.num_inputs, ctx.num_outputs = len(inputs), len(outputs)
        ctx.save_for_backward(*inputs, *outputs, *_tensors(computed.residuals, device))
        ctx.mark_non_differentiable(*(each for each in outputs[op.num_differentiable :] if each is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradients: tuple[torch.Tensor | None, ...] = _once_differentiable_backward(ctx, *output_gradients)
        return gradients


def _backward(ctx: Any, *output_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    end_of_outputs = ctx.num_inputs + ctx.num_outputs
    gradients = ctx.op.backward(
        saved[: ctx.num_inputs],
        saved[ctx.num_inputs : end_of_outputs],
        saved[end_of_outputs:],
        output_gradients[: ctx.op.num_differentiable],
    )
    return None, *_tensors(gradients, ctx.device)


_once_differentiable_backward = once_differentiable(_backward)


def _tensors(arrays: Arrays, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if array is None else tensor_of(np.asarray(array)).to(device) for array in arrays)
