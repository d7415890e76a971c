"""Checks of inputs and values against the variables of a layer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.implementation import CallKind, choose_implementation
from gradserve_server.layers.batch_norm.spec import channel_axis, check_dtype, check_rank
from gradserve_server.layers.batch_norm.variables import Variables
from gradserve_server.limits import quoted


def variables_for(
    config: BatchNormConfig, input_dtype: np.dtype[Any], input_shape: Sequence[int]
) -> tuple[int, np.dtype[Any]]:
    """Returns the number of channels and the dtype of the variables for such inputs.

    Args:
        config: The configuration of the layer.
        input_dtype: The dtype of the inputs.
        input_shape: The shape of the inputs, -1 for unknown sizes.

    Raises:
        InvalidArgumentError: The layer does not accept such inputs.
    """
    check_dtype(input_dtype, "input_dtype")
    check_rank(input_shape, "input_shape")
    if any(size < -1 for size in input_shape):
        raise InvalidArgumentError(
            f"expected sizes of at least 0, or -1 for any, got {list(input_shape)}", field="input_shape"
        )
    axis = channel_axis(len(input_shape), config.data_format)
    if input_shape[axis] < 0:
        raise InvalidArgumentError(
            f"expected the number of channels as size {axis} of input_shape, got {list(input_shape)}",
            field="input_shape",
        )
    kind = CallKind(len(input_shape), input_dtype, True, False, config.adjustment is not None)
    return input_shape[axis], choose_implementation(config, kind).variable_dtype(input_dtype)


def check_shared(layer: str, variables: Variables, channels: int, dtype: np.dtype[Any]) -> None:
    """Checks that inputs can share the existing variables.

    Args:
        layer: The name of the layer.
        variables: The existing variables.
        channels: The number of channels of the inputs.
        dtype: The dtype of variables for such inputs.

    Raises:
        InvalidArgumentError: The inputs need other variables.
    """
    shared = f"Trying to share variable {layer}/{next(iter(variables.by_name()))}, but specified"
    if variables.num_channels != channels:
        raise InvalidArgumentError(
            f"{shared} shape ({channels},) and found shape ({variables.num_channels},). "
            f"Expected {variables.num_channels} channels",
            field="inputs",
        )
    if variables.dtype != dtype:
        raise InvalidArgumentError(
            f"{shared} dtype {dtype} and found dtype {variables.dtype}. "
            f"Such inputs need variables of {dtype}, and the layer has {variables.dtype}",
            field="inputs",
        )


def check_name(layer: str, name: str, known: Collection[str], field: str) -> None:
    """Checks that a layer has a variable.

    Raises:
        NotFoundError: It has no variable of this name, or not yet.
    """
    if name not in known:
        has = f"it has {', '.join(known)}" if known else "its variables are created by the first forward"
        raise NotFoundError(f"layer {layer!r} has no variable {quoted(name)}; {has}", field=field)


def check_values(layer: str, variables: Variables | None, values: Mapping[str, Array]) -> None:
    """Checks that variables can be set to values, given by name.

    Raises:
        NotFoundError: The layer has no variable of this name, or not yet.
        InvalidArgumentError: A value has another dtype or shape than its variable.
    """
    found = {} if variables is None else variables.by_name()
    for index, (name, value) in enumerate(values.items()):
        check_name(layer, name, found, f"variables[{index}].name")
        expected = found[name]
        if value.dtype != expected.dtype or tuple(value.shape) != tuple(expected.shape):
            raise InvalidArgumentError(
                f"expected {expected.dtype} of shape {list(expected.shape)} for {name}, "
                f"got {value.dtype} of shape {list(value.shape)}",
                field=f"variables[{index}].tensor",
            )
