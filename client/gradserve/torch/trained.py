"""The parameters of a model that are trained."""

import torch

from gradserve.errors import InvalidArgumentError

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
    trained = {name: each for name, each in module_of(model).named_parameters() if each.requires_grad}
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


def module_of(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module in a wrapper for data parallelism or by torch.compile, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return model.module if isinstance(model, wrappers) else model
