"""Activation functions on the host: NumPy, or the kernels in `cpu_loops` once they are compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import (
    ChunkedKernels,
    Declared,
    ForkJoin,
    Kernel,
    KernelTable,
    PreparedKernels,
    aligned,
)
from gradserve_server.ops.activation.reference import activation, activation_grad
from gradserve_server.ops.activation.spec import BFLOAT16_ELEMENTS, FLOAT16_ELEMENTS, FLOAT32_ELEMENTS, NAMES
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, widened


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels that compute with float32 or float64; see `cpu_loops`."""

    forward: Kernel
    gradient: Kernel


IN_FLOAT32 = KernelTable(
    what="activation functions",
    package=__package__,
    kernels=Kernels,
    types={FLOAT32: {}},
    declared={
        "forward": Declared("cpu_loops.forward_float32", "int64, int64, const uint8[], int64, int64, uint8[]"),
        "gradient": Declared(
            "cpu_loops.gradient_float32", "int64, int64, const uint8[], const uint8[], int64, int64, uint8[]"
        ),
    },
)

IN_FLOAT64 = KernelTable(
    what="activation functions",
    package=__package__,
    kernels=Kernels,
    types={FLOAT64: {}},
    declared={
        "forward": Declared("cpu_loops.forward_float64", "int64, const float64[], int64, float64[]"),
        "gradient": Declared("cpu_loops.gradient_float64", "int64, const float64[], const float64[], int64, float64[]"),
    },
)


_KINDS: dict[np.dtype[Any], int] = {
    FLOAT32: FLOAT32_ELEMENTS,
    FLOAT16: FLOAT16_ELEMENTS,
    BFLOAT16: BFLOAT16_ELEMENTS,
}

_CHUNK_ELEMENTS = 1 << 15
"""The least work for a thread, ten microseconds or more. For less, none is woken up."""


class CpuActivation:
    """Activation functions by kernels, whose elements all threads share. Safe to use from several threads.

    Until the kernels for a dtype are ready, and if they cannot be compiled, NumPy computes its calls.
    """

    def __init__(self, parallel: ForkJoin, *, chunk_elements: int = _CHUNK_ELEMENTS) -> None:
        self._parallel = parallel
        self._chunk_elements = chunk_elements
        self._kernels = PreparedKernels(IN_FLOAT32, IN_FLOAT64, loader=parallel.loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._kernels.prepare(stop)

    def forward(self, name: str, x: NDArray[Any], out: NDArray[Any]) -> None:
        """Computes an activation function; `out` may be `x`."""
        kernels = self._kernels.get(widened(x.dtype))
        if kernels is not None and out.flags.aligned:
            self._run(kernels, kernels.forward, name, (x,), out)
            return
        with np.errstate(all="ignore"):
            out[...] = activation(np, name, x)

    def gradient(self, name: str, dy: NDArray[Any], saved: NDArray[Any], out: NDArray[Any]) -> None:
        """Computes the gradient with respect to the input; `out` may be `dy` or `saved`."""
        kernels = self._kernels.get(widened(dy.dtype))
        if kernels is not None and out.flags.aligned:
            self._run(kernels, kernels.gradient, name, (dy, saved), out)
            return
        with np.errstate(all="ignore"):
            out[...] = activation_grad(np, name, dy, saved)

    def _run(
        self, kernels: Kernels, kernel: Kernel, name: str, inputs: tuple[NDArray[Any], ...], out: NDArray[Any]
    ) -> None:
        flat_inputs = [aligned(array).reshape(-1) for array in inputs]
        flat_out = out.reshape(-1)
        arguments: tuple[Any, ...] = (*flat_inputs, self._chunk_elements, flat_out)
        kind = _KINDS.get(out.dtype)
        if kind is not None:
            all_bytes = [array.view(np.uint8) for array in flat_inputs]
            arguments = (kind, *all_bytes, out.size, self._chunk_elements, flat_out.view(np.uint8))
        kernels.run(self._parallel, kernel, (NAMES.index(name), *arguments), -(-out.size // self._chunk_elements))
