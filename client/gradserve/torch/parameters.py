"""The trained parameters of a model: their gradients, what is sent of them, and how a version gets into them."""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from numpy.typing import NDArray

from gradserve.conversion.plain import as_flag
from gradserve.parameter_records import check_version
from gradserve.torch.tensors import tensor_of
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

_MOST_NAMES = 5
_COMPILED = "_orig_mod"
"""The name of a module in the wrapper that torch.compile makes."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Gradients:
    """The gradients of the parameters that are averaged."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, zeros_for_missing: bool) -> None:
        """Sends zeros for parameters without a gradient if `zeros_for_missing`; otherwise these are errors."""
        self._parameters = parameters
        self._zeros_for_missing = zeros_for_missing

    def to_send(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that there are, in the memory where they are.

        Raises:
            InvalidArgumentError: A parameter has none, or a sparse one; the message names it.
        """
        missing = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        if missing and not self._zeros_for_missing:
            raise without_gradient(missing)
        found = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        for name, gradient in found.items():
            if gradient.layout is not torch.strided:
                raise InvalidArgumentError(
                    f"expected dense gradients, got a sparse one of parameter {name!r}; make its embedding with "
                    "sparse=False",
                    field="model",
                )
        return found

    def replace(self, average: Mapping[str, NDArray[Any]]) -> None:
        """Replaces the gradients by an average: one copy. A parameter that it does not have is left without one."""
        for name, parameter in self._parameters.items():
            if name not in average:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(tensor_of(average[name]))

    def drop(self) -> None:
        """Leaves all parameters without a gradient; the step of an optimizer then changes nothing."""
        for parameter in self._parameters.values():
            parameter.grad = None


def without_gradient(names: list[str]) -> InvalidArgumentError:
    """Returns the error for parameters that a backward pass has left without a gradient."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return InvalidArgumentError(
        f"no gradient for {len(names)} of the model's parameters: {', '.join(map(repr, names[:_MOST_NAMES]))}{more}. "
        "Every worker has to send every gradient in each step: set requires_grad=False for parameters that are not "
        "trained before the run begins, or use them in every forward. Zeros are sent for the others by "
        "average_gradients(missing='zeros') and by DistributedDataParallel(find_unused_parameters=True)",
        field="model",
    )


def trained_parameters(model: torch.nn.Module, *, may_be_sharded: bool = False) -> dict[str, torch.Tensor]:
    """Returns a model's parameters that require a gradient, by name. Wrappers for data parallelism are looked into.

    Raises:
        InvalidArgumentError: There are none, or one has a dtype that cannot be averaged, or is sharded and may not be.
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
        if hasattr(parameter, "placements") and not may_be_sharded:
            raise InvalidArgumentError(
                f"parameter {name!r} is sharded over a process group; synchronize sharded models with DiLoCo, or "
                "average their gradients with all_reduce_hook",
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
    left_out = buffers - persistent_buffers(module).keys()
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


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a checkpoint has, too, by name."""
    names = {
        _uncompiled(f"{prefix}.{name}" if prefix else name)
        for prefix, each in module.named_modules()
        for name in each._buffers.keys() - each._non_persistent_buffers_set
    }
    return {name: each for name, each in named_buffers(module) if name in names}


def named_parameters(model: torch.nn.Module, *, all_names: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters with the names that they have without torch.compile, so that workers may differ in it.

    Args:
        model: The model.
        all_names: Whether a parameter with several names comes with each of them; otherwise with the first.
    """
    named = model.named_parameters(remove_duplicate=not all_names)
    return ((_uncompiled(name), each) for name, each in named)


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
