"""Autograd over ops of a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gradserve.errors import UnimplementedError
from gradserve.torch.tensors import tensor_of

Arrays: TypeAlias = Sequence[NDArray[Any] | None]
_Tensors: TypeAlias = tuple[torch.Tensor | None, ...]


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
        name: The name of the function, for messages.
        forward: Called with the inputs.
        backward: Called with the inputs, the outputs, the residuals, and the gradients with respect to the outputs that
            have one; returns the gradients with respect to the inputs, with None for those that have none.
        num_differentiable: The number of outputs, counted from the first, that have a gradient.
        needs_outputs: Whether the gradient is computed from the outputs, too. Otherwise they may be changed in place.
        local: The first output, in PyTorch's own ops. With it, gradients can be differentiated again: their derivatives
            are computed where the program runs. None: they are refused.
    """

    name: str
    forward: Callable[..., Computed]
    backward: Callable[..., Arrays]
    num_differentiable: int
    needs_outputs: bool = False
    local: Callable[..., torch.Tensor] | None = None

    def __call__(self, *inputs: torch.Tensor | None) -> tuple[Any, ...]:
        """Computes the op, for tensors of one device; returns its outputs on that device."""
        outputs: tuple[Any, ...] = _Function.apply(self, *inputs)
        return outputs


class _Function(torch.autograd.Function):
    """The op that is its first argument."""

    @staticmethod
    def forward(ctx: Any, op: ServedOp, *inputs: torch.Tensor | None) -> _Tensors:
        device = next(each.device for each in inputs if each is not None)
        computed = op.forward(*inputs)
        outputs = _tensors(computed.outputs, device)
        kept = outputs if op.needs_outputs else (None,) * len(outputs)
        ctx.op = op
        ctx.ends = len(inputs), len(inputs) + len(outputs)
        ctx.save_for_backward(*inputs, *kept, *_tensors(computed.residuals, device))
        ctx.mark_non_differentiable(*(each for each in outputs[op.num_differentiable :] if each is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: torch.Tensor | None) -> _Tensors:
        dy = output_gradients[: ctx.op.num_differentiable]
        gradients: _Tensors = _Gradient.apply(ctx.op, ctx.ends, *ctx.saved_tensors, *dy)
        return None, *gradients


class _Gradient(torch.autograd.Function):
    """The gradient of an op: of its inputs, outputs and residuals, which end at `ends`, and the outputs' gradients."""

    @staticmethod
    def forward(ctx: Any, op: ServedOp, ends: tuple[int, int], *tensors: torch.Tensor | None) -> _Tensors:
        end_of_inputs, end_of_outputs = ends
        end_of_residuals = len(tensors) - op.num_differentiable
        inputs, dy = tensors[:end_of_inputs], tensors[end_of_residuals:]
        device = next(each.device for each in inputs if each is not None)
        gradients = op.backward(
            inputs, tensors[end_of_inputs:end_of_outputs], tensors[end_of_outputs:end_of_residuals], dy
        )
        ctx.op, ctx.num_between = op, end_of_residuals - end_of_inputs
        ctx.save_for_backward(*inputs, *dy)
        return _tensors(gradients, device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> _Tensors:
        op: ServedOp = ctx.op
        if op.local is None:
            raise UnimplementedError(
                f"{op.name} has no second derivatives: its gradient was computed with create_graph=True, and cannot be "
                "differentiated again; detach it, or leave create_graph out",
            )
        *inputs, dy = ctx.saved_tensors
        wanted = [gradient is not None for gradient in gradients]
        is_differentiated_again = torch.is_grad_enabled()
        with torch.enable_grad():
            places = [_as_variable(each) if each is not None else None for each in (*inputs, dy)]
            variables = [each for each, is_wanted in zip(places, wanted, strict=False) if is_wanted]
            first = torch.autograd.grad(op.local(*places[:-1]), variables, places[-1], create_graph=True)
            second = torch.autograd.grad(
                first,
                [*variables, places[-1]],
                [each for each in gradients if each is not None],
                create_graph=is_differentiated_again,
                materialize_grads=True,
            )
        of_variables = iter(second)
        of_inputs = [next(of_variables) if is_wanted else None for is_wanted in wanted]
        return None, None, *of_inputs, *[None] * ctx.num_between, next(of_variables)


def _as_variable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor to differentiate by, alone: what else was computed from the same tensors is constant."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _tensors(arrays: Arrays, device: torch.device) -> _Tensors:
    return tuple(None if array is None else tensor_of(np.asarray(array)).to(device) for array in arrays)
