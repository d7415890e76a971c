"""Names, and what a new accumulator is made of."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from gradserve.calls.accumulator_wire import ComponentSpec
from gradserve.calls.identity import RequestIds
from gradserve.results import DenseSpec, SparseSpec, TensorHandle


def private_name(name: str, ids: RequestIds) -> str:
    """Returns a name that no other client uses."""
    return f"{name}-{ids.name()}"


def is_name(value: object) -> bool:
    """Returns whether a value is text that can be sent."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def component_specs(components: Mapping[str, ArrayLike | TensorHandle | ComponentSpec]) -> dict[str, ComponentSpec]:
    """Returns a spec for each component, where an array or handle was given that of its gradients."""
    return {
        name: value if isinstance(value, DenseSpec | SparseSpec) else _spec_of(value)
        for name, value in components.items()
    }


def _spec_of(value: ArrayLike | TensorHandle) -> DenseSpec:
    like = value if isinstance(value, TensorHandle) else np.asarray(value)
    return DenseSpec(like.dtype, like.shape)
