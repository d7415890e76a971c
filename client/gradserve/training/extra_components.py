"""The component that travels beside the gradients and says which parameters had one.

An average that is zero everywhere does not say whether nobody had a gradient, or those of all workers were zero. An
optimizer with weight decay or momentum has to know.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.results import DenseSpec

PRESENCE = "gradserve/present"
"""The component that says so: 1 for each parameter with a gradient, 0 for each without one, in their order."""


def presence_spec(num_parameters: int) -> DenseSpec:
    """Returns the component for a number of parameters."""
    return DenseSpec("float32", (num_parameters,))


def presence_of(names: Sequence[str], present: Container[str]) -> NDArray[np.float32]:
    """Returns what a worker sends: float32, [number of names], 1 for those that are present and 0 for the others."""
    return np.asarray([name in present for name in names], np.float32)


def present_names(names: Sequence[str], average: Mapping[str, NDArray[Any]]) -> frozenset[str]:
    """Returns the names of the parameters of which at least one worker of a round had a gradient."""
    return frozenset(name for name, share in zip(names, average[PRESENCE], strict=True) if share > 0)
