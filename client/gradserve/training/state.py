"""What a worker needs to begin where another one is, and how it travels."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.array_like import ArrayLike
from gradserve.conversion.argument import Argument
from gradserve.conversion.arrays import as_array
from gradserve.errors import InvalidArgumentError
from gradserve.results import DenseSpec

_CARRIERS = {
    **dict.fromkeys(("bool", "int8", "uint8"), "float16"),
    **dict.fromkeys(("int16", "uint16"), "float32"),
    **dict.fromkeys(("int32", "uint32", "int64", "uint64"), "float64"),
    **{dtype: dtype for dtype in ("float16", "bfloat16", "float32", "float64")},
}
"""The dtypes of accumulators in which values of other dtypes travel exactly: the largest ones only up to 2^53."""
_LARGEST = 1 << 53
TEXT = DenseSpec("float16", (None,))
"""The component in which a text travels: its bytes in UTF-8."""


@dataclass(frozen=True)
class State:
    """What a worker needs to begin where another one is.

    Attributes:
        tensors: Parameters, running averages, the state of an optimizer, by name: arrays of any library in the memory
            of the host, of floating point numbers, integers or flags. NumPy arrays in a state that was received.
        metadata: What else there is, as values that JSON can express: the learning rate, for example.
    """

    tensors: Mapping[str, ArrayLike]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Carried:
    """A copy of a state, in the dtypes of accumulators.

    Attributes:
        tensors: The tensors that travel, by name.
        dtypes: Their own dtypes, by name.
        metadata: The metadata.
    """

    tensors: Mapping[str, NDArray[Any]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, state: State) -> "Carried":
        """Copies a state, whose arrays may change afterwards.

        Raises:
            InvalidArgumentError: A tensor cannot travel.
        """
        arrays = {name: as_array(tensor, Argument(f"tensors[{name!r}]")) for name, tensor in state.tensors.items()}
        return cls(
            {name: _carried(name, array) for name, array in arrays.items()},
            {name: array.dtype.name for name, array in arrays.items()},
            dict(state.metadata),
        )

    @property
    def layout(self) -> dict[str, Any]:
        """The shape, the dtype in which it travels and its own dtype of each tensor, as JSON has them."""
        return {
            name: [list(tensor.shape), tensor.dtype.name, self.dtypes[name]] for name, tensor in self.tensors.items()
        }


def specs_of(layout: Mapping[str, Any]) -> dict[str, DenseSpec]:
    """Returns the components of an accumulator for states of a layout."""
    return {name: DenseSpec(carrier, tuple(shape)) for name, (shape, carrier, _) in layout.items()}


def restored(tensors: Mapping[str, NDArray[Any]], layout: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a state of a layout, in their own dtypes."""
    return {name: np.asarray(tensors[name]).astype(own, copy=False) for name, (_, _, own) in layout.items()}


def as_text(values: Any) -> NDArray[np.float16]:
    """Returns JSON values as they travel.

    Raises:
        InvalidArgumentError: JSON cannot express them.
    """
    try:
        text = json.dumps(values, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the metadata of a state must be values that JSON can express: {error}", field="metadata"
        ) from None
    return np.frombuffer(text.encode(), np.uint8).astype(np.float16)


def of_text(carried: NDArray[Any]) -> Any:
    """Returns the values of a text."""
    return json.loads(carried.astype(np.uint8).tobytes())


def _carried(name: str, array: NDArray[Any]) -> NDArray[Any]:
    carrier = _CARRIERS.get(array.dtype.name)
    if carrier is None:
        raise InvalidArgumentError(
            f"tensor {name!r} of the state is of dtype {array.dtype.name}; expected one of {', '.join(_CARRIERS)}. "
            "Leave it out, or store it as tensors of such a dtype",
            field=f"tensors[{name!r}]",
        )
    if array.dtype.itemsize == 8 and array.dtype.kind in "iu" and array.size:
        least, largest = int(array.min()), int(array.max())
        if max(-least, largest) > _LARGEST:
            raise InvalidArgumentError(
                f"tensor {name!r} of the state has integers from {least} to {largest}; expected none beyond 2^53, as "
                "only those travel exactly",
                field=f"tensors[{name!r}]",
            )
    return array.astype(carrier)
