"""What TensorFlow's activation functions gave, as recorded by make_activation.py.

Inputs are those of `INPUTS`, in float64; `load_recorded()["gelu"]` has the results and the gradients for a dy of 1.
"""

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

INPUTS = np.concatenate([np.arange(-192, 193) / 16, [-100.0, -30.0, -1e-9, -0.0, 1e-9, 30.0, 100.0]])
"""The kinks are among them."""


@functools.cache
def load_recorded() -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Returns results and gradients at `INPUTS` by the name of the function."""
    with np.load(Path(__file__).with_name("activation.npz")) as file:
        return {name: (file[name][0], file[name][1]) for name in file.files}
