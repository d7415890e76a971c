"""The state that a worker needs to begin where another one is, and its form on the way."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve.conversion.arrays import as_array
from gradserve.results import ArrayLike, DenseSpec
from gradserve.training.values import Json, as_json, from_json
from gradserve_protocol.argument import Argument

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_BYTES, _TEXT = "bytes", "text"
DATA = "gradserve/data"
"""The key, in the metadata of states on their way, of what has counted of the data of the run."""
_PARTS = {"complex64": "float32", "complex128": "float64"}
"""The component in which tensors of a dtype travel, as numbers of this dtype; those of `_FLOATS` have their own."""
TEXT = DenseSpec("float16", (None,))
"""The component in which a text travels: its bytes in UTF-8."""
COMPONENTS = {_TEXT: TEXT, _BYTES: TEXT} | {dtype: DenseSpec(dtype, (None,)) for dtype in _FLOATS}
"""The components of an accumulator for states, whatever tensors these have: all of a dtype, one after the other."""


@dataclass(frozen=True)
class State:
    """The state that a worker needs to begin where another one is.

    Attributes:
        tensors: Parameters, running averages, the state of an optimizer, by name: arrays of any library in the memory
            of the host, of any dtype of numbers. NumPy arrays in a state that was received.
        metadata: What else there is, the learning rate, for example: numbers and texts, and lists, dicts, tuples, sets,
            Counters, dataclasses and the like of them. It arrives with the same types.
    """

    tensors: Mapping[str, ArrayLike]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Carried:
    """A copy of a state, as it travels.

    Attributes:
        components: The tensors, by the names of the components of an accumulator.
        layout: The dtype and the shape of each tensor by name, in the order in which they are in the components.
        metadata: The metadata, as JSON has it.
    """

    components: Mapping[str, NDArray[Any]]
    layout: Mapping[str, tuple[str, list[int]]]
    metadata: Json

    @classmethod
    def of(cls, state: State) -> "Carried":
        """Copies a state, whose arrays may change afterwards.

        Raises:
            InvalidArgumentError: A tensor or something in the metadata cannot travel; the message names it.
        """
        metadata = as_json(dict(state.metadata), "metadata")
        arrays = {name: _array(name, tensor) for name, tensor in state.tensors.items()}
        parts: dict[str, list[NDArray[Any]]] = {component: [] for component in COMPONENTS if component != _TEXT}
        for array in arrays.values():
            component, numbers = _numbers(array)
            parts[component].append(numbers)
        return cls(
            {component: _joined(component, each) for component, each in parts.items()},
            {name: (array.dtype.name, list(array.shape)) for name, array in arrays.items()},
            metadata,
        )

    def gradient(self, **more: Json) -> dict[str, NDArray[Any]]:
        """Returns the state as a gradient of an accumulator of COMPONENTS.

        Args:
            more: What else to say of the state.
        """
        text = as_text({"layout": self.layout, "metadata": self.metadata, **more})
        return {**self.components, _TEXT: text}


@dataclass(frozen=True)
class Arrived:
    """A state that another worker has sent.

    Attributes:
        state: The state; the arrays may be read-only.
        layout: The dtype and the shape of each tensor by name.
        said: What else was said of it.
    """

    state: State
    layout: Mapping[str, tuple[str, list[int]]]
    said: Mapping[str, Json]

    @classmethod
    def of(cls, average: Mapping[str, NDArray[Any]]) -> "Arrived":
        """Reads the average of a round with one gradient, which `Carried.gradient` has made.

        Raises:
            InvalidArgumentError: It has something of a class that this program does not have.
        """
        said = of_text(average[_TEXT])
        layout = {name: (dtype, shape) for name, (dtype, shape) in said.pop("layout").items()}
        metadata = from_json(said.pop("metadata"))
        begins = dict.fromkeys(COMPONENTS, 0)
        tensors = {}
        for name, (dtype, shape) in layout.items():
            component, size = _place(np.dtype(dtype), prod(shape))
            begin = begins[component]
            begins[component] = begin + size
            tensors[name] = _tensor(average[component][begin : begin + size], np.dtype(dtype), shape)
        return cls(State(tensors, metadata), layout, said)


def as_text(values: Json) -> NDArray[np.float16]:
    """Returns JSON values as they travel."""
    text = json.dumps(values, separators=(",", ":"))
    return np.frombuffer(text.encode(), np.uint8).astype(np.float16)


def of_text(carried: NDArray[Any]) -> Any:
    """Returns the values of a text."""
    return json.loads(carried.astype(np.uint8).tobytes())


def _array(name: str, tensor: ArrayLike) -> NDArray[Any]:
    if isinstance(tensor, np.ndarray) and hasattr(ml_dtypes, tensor.dtype.name):
        return tensor
    return as_array(tensor, Argument(f"tensors[{name!r}]"))


def _place(dtype: np.dtype[Any], size: int) -> tuple[str, int]:
    """Returns the component in which a tensor of a dtype and a size travels, and as how many numbers."""
    if dtype.name in _FLOATS:
        return dtype.name, size
    if dtype.name in _PARTS:
        return _PARTS[dtype.name], 2 * size
    return _BYTES, dtype.itemsize * size


def _numbers(array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Returns the component in which an array travels, and its numbers: bytes for what is not floating point."""
    component, _ = _place(array.dtype, array.size)
    flat = np.ascontiguousarray(array).reshape(-1)
    return component, flat.view(np.uint8 if component == _BYTES else component)


def _joined(component: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Returns a copy of the numbers of a component. Bytes travel in float16, which has all numbers up to 2048."""
    joined = np.empty(sum(each.size for each in parts), COMPONENTS[component].dtype)
    begin = 0
    for each in parts:
        joined[begin : begin + each.size] = each
        begin += each.size
    return joined


def _tensor(numbers: NDArray[Any], dtype: np.dtype[Any], shape: list[int]) -> NDArray[Any]:
    is_bytes = _place(dtype, 0)[0] == _BYTES
    return (numbers.astype(np.uint8) if is_bytes else np.ascontiguousarray(numbers)).view(dtype).reshape(shape)
