"""The recorded calls of the batch_norm layer that tf_slim refuses, and those that look wrong but that it takes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer; all numbers of its inputs are ones.

    Attributes:
        arguments: Of the layer, in the form of `LayerCase.arguments`.
        x: Its input.
        batch_weights: As given to the call; or None.
        adjustment: Scale and bias, as given to the call; or None.
        is_training: Of the call.
    """

    arguments: Mapping[str, Any]
    x: NDArray[Any]
    batch_weights: NDArray[Any] | None
    adjustment: tuple[NDArray[Any], NDArray[Any]] | None
    is_training: bool


@dataclass(frozen=True)
class Refusal:
    """Calls in one server, or graph. The last is refused, or taken.

    Attributes:
        name: What is wrong, or seems to be.
        calls: Each of a new layer object; two with the same scope share variables.
        error_type: Of TensorFlow's exception: "ValueError" or "TypeError"; None where the call is taken.
        text: Its message; empty where the call is taken.
    """

    name: str
    calls: tuple[LayerCall, ...]
    error_type: str | None
    text: str

    def __str__(self) -> str:
        return self.name


def load_refusals() -> tuple[Refusal, ...]:
    """Returns the calls that are refused."""
    return tuple(refusal for refusal in _load() if refusal.error_type is not None)


def load_taken() -> tuple[Refusal, ...]:
    """Returns the calls that look wrong, but that the layer takes."""
    return tuple(refusal for refusal in _load() if refusal.error_type is None)


def _load() -> list[Refusal]:
    recorded = json.loads(Path(__file__).with_name("batch_norm_layer_errors.json").read_text())
    return [
        Refusal(
            name=entry["name"],
            calls=tuple(_call(call) for call in entry["calls"]),
            error_type=entry["error"] and entry["error"]["type"],
            text=entry["error"]["text"] if entry["error"] else "",
        )
        for entry in recorded["errors"]
    ]


def _call(entry: Mapping[str, Any]) -> LayerCall:
    arguments = dict(entry["arguments"])
    if "param_initializers" in arguments:
        arguments["param_initializers"] = {
            name: np.ones(shape, np.float32) for name, shape in arguments["param_initializers"].items()
        }
    adjustment = _ones(entry["adjustment"])
    return LayerCall(
        arguments=arguments,
        x=np.ones(entry["shape"], entry["dtype"]),
        batch_weights=_ones(entry["batch_weights"]),
        adjustment=None if adjustment is None else (adjustment, adjustment),
        is_training=entry["is_training"],
    )


def _ones(dtype_and_shape: tuple[str, list[int]] | None) -> NDArray[Any] | None:
    if dtype_and_shape is None:
        return None
    dtype, shape = dtype_and_shape
    return np.ones(shape, dtype)
