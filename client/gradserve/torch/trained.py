"""The parameters of a model that are trained, and what else of it workers give to each other."""

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

import torch

from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_flag
from gradserve.errors import InvalidArgumentError

_COMPILED = "_orig_mod"
"""The name of a module in the wrapper that torch.compile makes."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters that require a gradient, by name. Wrappers for data parallelism are looked into.

    Raises:
        InvalidArgumentError: There are none, or one is sharded or has a dtype that cannot be averaged.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"expected a torch.nn.Module for model, got {type(model).__qualname__}", field="model"
        )
    trained = {name: each for name, each in named_parameters(module_of(model)) if each.requires_grad}
    if not trained:
        raise InvalidArgumentError(
            "expected parameters that require a gradient in model, got none; see requires_grad_()", field="model"
        )
    for name, parameter in trained.items():
        if hasattr(parameter, "placements"):
            raise InvalidArgumentError(
                f"parameter {name!r} is sharded over a process group; average sharded models with all_reduce_hook",
                field="model",
            )
        if parameter.dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"expected float16, bfloat16, float32 or float64 for parameter {name!r}, got {parameter.dtype}; set "
                "requires_grad=False if it is not trained",
                field="model",
            )
    return trained


def tensors_left_out(model: torch.nn.Module, send_frozen: bool, leave_out: Collection[str]) -> frozenset[str]:
    """Returns the names of parameters and buffers that workers do not give to each other, as each has them already.

    Args:
        model: The model.
        send_frozen: Whether parameters that require no gradient travel.
        leave_out: Names of frozen parameters and of buffers, or patterns of names as in `fnmatch`. Buffers that are not
            persistent are left out in any case.

    Raises:
        InvalidArgumentError: A pattern fits nothing, or a parameter that is trained.
    """
    if isinstance(leave_out, str) or not all(isinstance(each, str) for each in leave_out):
        raise Argument("leave_out").error("names of frozen parameters and buffers", leave_out)
    module = module_of(model)
    frozen = {name for name, each in named_parameters(module) if not each.requires_grad}
    trained = {name for name, each in named_parameters(module) if each.requires_grad}
    buffers = {name for name, _ in named_buffers(module)}
    left_out = buffers - _persistent_buffers(module)
    if not as_flag(send_frozen, Argument("send_frozen")):
        left_out |= frozen
    for pattern in leave_out:
        fits = {name for name in frozen | trained | buffers if fnmatchcase(name, pattern)}
        if not fits or fits & trained:
            found = f"trained parameter {min(fits & trained)!r}" if fits else "nothing"
            raise InvalidArgumentError(
                f"expected names or patterns of frozen parameters and buffers for leave_out, got {pattern!r}, which "
                f"fits {found} of the model",
                field="leave_out",
            )
        left_out |= fits
    return frozenset(left_out)


def _persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Returns the names of the buffers that a checkpoint has, too."""
    return {
        _uncompiled(f"{prefix}.{name}" if prefix else name)
        for prefix, each in module.named_modules()
        for name in each._buffers.keys() - each._non_persistent_buffers_set
    }


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters with the names that they have without torch.compile, so that workers may differ in it."""
    return ((_uncompiled(name), each) for name, each in model.named_parameters())


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers, likewise."""
    return ((_uncompiled(name), each) for name, each in model.named_buffers())


def module_of(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module in wrappers for data parallelism and by torch.compile, or the model itself."""
    model = getattr(model, _COMPILED, model)
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return getattr(model.module, _COMPILED, model.module) if isinstance(model, wrappers) else model


def _uncompiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)
