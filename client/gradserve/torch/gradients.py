"""The gradients of parameters, as an optimizer finds them."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from gradserve.errors import InvalidArgumentError
from gradserve.torch.tensors import tensor_of

_MOST_NAMES = 5


class Gradients:
    """The gradients of the parameters that are averaged."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, zeros_for_missing: bool) -> None:
        """Takes the parameters by name, and whether a parameter may be without a gradient: zeros count for it."""
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
