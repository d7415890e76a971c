"""Warnings about tensors of PyTorch whose gradient would be lost."""

import sys
import warnings
from typing import Any

from gradserve.calls.ignored_arguments import depth_in_package


def warn_of_graph(value: Any, name: str) -> None:
    """Warns about a tensor that requires a gradient: the results of raw ops are arrays, in which the graph ends."""
    if getattr(value, "requires_grad", False) is not True:
        return
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    warnings.warn(
        f"{name} requires a gradient, but raw ops return arrays, through which there is none; use "
        "gradserve.torch.functions, or pass the tensor's detach()",
        UserWarning,
        stacklevel=depth_in_package(),
    )
