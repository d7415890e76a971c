"""The kernels of FusedBatchNorm on the host: what they take and do.

T and U are the dtypes of `spec`; T comes as `intrinsics` says. x has one of two forms:

* rows of `columns` elements, each column belonging to one channel; what is left after the last whole row is the end of
  one more row. Loops run along rows, so they are long however few channels there are.
* planes [outer, channels, inner]. Loops run along a plane.

Each kernel takes chunks of its work until none is left. Any number of threads may call it with the same arguments, at
the same time or later, and one alone does it all; who needs the results must `wait_until_done`. What comes out does not
depend on how many threads there are.

Sums are in U within a block and in float64 over blocks. A block is cut into the same partial sums on every processor,
none of which is rounded more than 40 times; docs/fused_batch_norm.md has the bounds of the errors that follow. Moments
are first those of differences from an estimate of the mean. Where it turns out to be further than a standard deviation
from the mean, the sum of squares is too inexact: then they are computed again, with the mean that was found. Moments of
blocks are combined as by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import aligned

Kernel: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """The kernels for one T, and in which dtype they take its arrays."""

    bits: np.dtype[Any]
    wait_until_done: Kernel
    rows_forward: Kernel
    rows_gradient: Kernel
    planes_forward: Kernel
    planes_gradient: Kernel

    def flat(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns an array of T as the kernels take it."""
        return aligned(array).reshape(-1).view(self.bits)
