"""Checks handles of tensors on the server."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradserve.conversion.plain import is_text
from gradserve.results import TensorHandle
from gradserve_protocol.argument import Argument


def as_handle(value: Any, argument: Argument) -> TensorHandle:
    """Returns the handle of a tensor.

    Raises:
        InvalidArgumentError: It is something else, or was not made by the client.
    """
    if not isinstance(value, TensorHandle):
        raise argument.error("a TensorHandle", value)
    if not (is_text(value.handle) and isinstance(value.dtype, np.dtype) and isinstance(value.shape, tuple)):
        raise argument.error_saying("a TensorHandle that the client returned", "another one")
    return value


def as_handles(values: Sequence[Any], name: str) -> list[TensorHandle]:
    """Returns the handles of tensors, given the name of their argument.

    Raises:
        InvalidArgumentError: One of them is something else.
    """
    return [as_handle(value, Argument(f"{name}[{index}]")) for index, value in enumerate(values)]
