"""Ops of a server as operators of PyTorch, which autograd, torch.func, torch.compile and vmap understand.

An op is registered in `torch.library` with a fake kernel, so that compiled code holds it as one node, and serves as the
forward of a torch.autograd.Function. Its gradient is another op with a function of its own, whose backward is the
derivative of the gradient, or refuses.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from gradserve.client import Client, client_named, name_of
from gradserve.conversion.plain import as_flag, as_integer, as_number, as_text
from gradserve.torch.tensors import tensor_of
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

_CONVERSIONS: dict[type, Callable[[Any, Argument], Any]] = {
    bool: as_flag,
    float: as_number,
    int: as_integer,
    str: as_text,
}


def served_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Sequence[Any]]], Any]:
    """Registers a call of the server as an operator.

    The call is given the client in place of its name, and tensors. Its arrays become tensors of their own on the device
    of the first tensor.

    Args:
        schema: The operator's name and schema: "layer_norm(str client, Tensor x) -> (Tensor, Tensor)".
        fake: Returns empty tensors with the shapes and dtypes of the outputs, without a call.
    """
    name, _, arguments = schema.partition("(")

    def register(call: Callable[..., Sequence[Any]]) -> Any:
        def compute(client: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
            device = next(each.device for each in arguments if isinstance(each, torch.Tensor))
            return tuple(_own_tensor(each).to(device) for each in call(client_named(client), *arguments))

        op: Any = torch.library.custom_op(f"gradserve::{name}", compute, mutates_args=(), schema=f"({arguments}")
        op.register_fake(fake)
        if hasattr(op, "register_vmap"):  # PyTorch 2.5 or newer; for vmap in compiled code
            op.register_vmap(_vmap_of(op))
        return getattr(torch.ops.gradserve, name).default

    return register


def differentiable(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator as a function with a derivative.

    Compiled code has the operator itself, which is given the derivative, too; torch.func cannot see through that one.

    Args:
        op: The operator.
        setup_context: See torch.autograd.Function.
        backward: Likewise.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
            return _vmap_of(Function.apply)(info, in_dims, *inputs)

    Function.setup_context = staticmethod(setup_context)
    Function.backward = staticmethod(backward)
    torch.library.register_autograd(op.name(), backward, setup_context=setup_context)

    def apply(*inputs: Any) -> Any:
        return op(*inputs) if torch.compiler.is_compiling() else Function.apply(*inputs)

    return apply


def keep_client(ctx: Any, client: str) -> None:
    """Notes the client for the backward, and keeps it from being collected until then."""
    ctx.client = client
    if not torch.compiler.is_compiling():
        ctx.kept_client = client_named(client)


def no_second_derivative(op: str) -> Callable[..., NoReturn]:
    """Returns the backward of a gradient that has no derivative."""

    def backward(_ctx: Any, *_gradients: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"expected at most first derivatives of {op}, got a gradient of its gradient, which is not computed; leave "
            "out create_graph=True, or compute this part of the model with PyTorch's own layer",
            field="create_graph",
        )

    return backward


def checked_name(client: Client, **tensors: torch.Tensor | None) -> str:
    """Returns the client's name for operators.

    Raises:
        InvalidArgumentError: The client is not a blocking client, or an argument is not a tensor.
    """
    if not isinstance(client, Client):
        raise InvalidArgumentError(
            f"expected a gradserve.Client for client, got {type(client).__qualname__}", field="client"
        )
    for name, each in tensors.items():
        if each is not None and not isinstance(each, torch.Tensor):
            raise InvalidArgumentError(f"expected a torch.Tensor for {name}, got {type(each).__qualname__}", field=name)
    return name_of(client)


def plain(kind: type, value: Any, name: str) -> Any:
    """Returns an argument as a bool, a float, an int or a str.

    Raises:
        InvalidArgumentError: It is something else.
    """
    return value if type(value) is kind else _CONVERSIONS[kind](value, Argument(name))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of moments and scales of tensors of a dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _own_tensor(array: Any) -> torch.Tensor:
    """Returns an array as a tensor that may be changed in place."""
    return tensor_of(np.require(np.asarray(array), requirements="W"))


def _vmap_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule of a function for vmap: one call of the server for each element."""

    def rule(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
        results = [
            function(
                *(each if dim is None else each.select(dim, index) for each, dim in zip(inputs, in_dims, strict=True))
            )
            for index in range(info.batch_size)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule
