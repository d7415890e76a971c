"""The kernels of GRUBlockCell on the host: what they take and do.

Each takes chunks of its work until none is left. Any number of threads may call it with the same arguments, at the
same time or later, and one alone does it all; who needs the results must `wait_until_done`. What comes out does not
depend on how many threads there are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Kernel: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """The kernels for float32 or float64, which do what `loops` says."""

    wait_until_done: Kernel
    gates: Kernel
    state: Kernel
    gradient_of_state: Kernel
    gradient_of_reset: Kernel
    gradient_of_inputs: Kernel


@dataclass(frozen=True)
class Conversions:
    """The kernels between a dtype of 16 bits and float32, and in which dtype they take the former."""

    bits: np.dtype[Any]
    wait_until_done: Kernel
    to_float32: Kernel
    from_float32: Kernel
