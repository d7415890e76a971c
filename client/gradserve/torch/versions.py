"""Models whose parameters a server holds: what is sent of a model, and how a version gets into it."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from gradserve.torch.parameters import Gradients, module_of, named_parameters, trained_parameters
from gradserve.torch.tensors import tensor_of
from gradserve.training.versions import check_version


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters of a model that require a gradient, by name, as `Client.parameters` takes them.

    Names are those without torch.compile and wrappers for data parallelism. A parameter with several names (tied) has
    the first. Frozen parameters and buffers, such as running means, are not among them: they stay with the worker.

    Args:
        model: The model.

    Returns:
        Tensors in the memory of the parameters, without gradients.

    Raises:
        InvalidArgumentError: There are none, or one is sharded or has a dtype that cannot be averaged.
    """
    return {name: each.detach() for name, each in trained_parameters(model).items()}


def load_version(model: torch.nn.Module, version: Mapping[str, NDArray[Any]]) -> None:
    """Copies a version into the parameters of a model, in place: optimizers of the model keep their state.

    Values are rounded to the dtypes of the model if these are shorter.

    Args:
        model: The model.
        version: The version, or any mapping from names to arrays, such as what `load_parameters` returns.

    Raises:
        InvalidArgumentError: The version has other names or shapes than the model. Nothing was copied.
    """
    found = _found(model, version)
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(tensor_of(version[name]))


def delta_of(model: torch.nn.Module, version: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Returns the parameters of a model minus the version that was loaded: an update, where update is "delta".

    Args:
        model: The model, which `load_version` has given the version, and which was trained since.
        version: The version.

    Returns:
        New tensors by name, on the device and of the dtype of each parameter that requires a gradient. Differences are
        from the values that the model had after loading, rounded if its dtypes are shorter than those of the version.

    Raises:
        InvalidArgumentError: The version has other names or shapes than the model.
    """
    return {
        name: each.detach() - tensor_of(version[name]).to(device=each.device, dtype=each.dtype)
        for name, each in _found(model, version).items()
        if each.requires_grad
    }


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradients of a model's parameters: an update, where update is "gradient".

    Args:
        model: The model, after its backward pass.

    Returns:
        The gradients by name, in the memory where they are. Parameters without one are left out: the server skips those
        that no worker of the round has a gradient of.

    Raises:
        InvalidArgumentError: A gradient is sparse; or no parameter requires a gradient, or one is sharded or has a
            dtype that cannot be averaged.
    """
    return Gradients(trained_parameters(model), zeros_for_missing=True).to_send()


def _found(model: torch.nn.Module, version: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Returns the parameters of a model that a version has values of: all that are trained, and maybe frozen ones."""
    trained = trained_parameters(model)
    own = dict(named_parameters(module_of(model)))
    all_names = (name for name, _ in named_parameters(module_of(model), all_names=True))
    check_version(
        version, {name: tuple(each.shape) for name, each in own.items()}, needed=trained, also_known=all_names
    )
    return {name: each for name, each in own.items() if name in version}
