"""The kernels of activation functions on the host: what they take and do.

Each takes chunks of its work until none is left. Any number of threads may call it with the same arguments, at the
same time or later, and one alone does it all; who needs the results must `wait_until_done`. What comes out does not
depend on how many threads there are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Kernel: TypeAlias = Callable[..., None]

FLOAT32_ELEMENTS, FLOAT16_ELEMENTS, BFLOAT16_ELEMENTS = range(3)
"""What those that compute with float32 take for `kind`."""


@dataclass(frozen=True)
class Kernels:
    """The kernels that compute with float32 or float64, which do what `loops` says."""

    wait_until_done: Kernel
    forward: Kernel
    gradient: Kernel
