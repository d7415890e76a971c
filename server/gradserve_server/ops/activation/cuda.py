"""Activation functions on a GPU: the CUDA programs and their launches. Importing this needs no GPU."""

import functools
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.programs import (
    ELEMENT_THREADS,
    ELEMENTS,
    KernelDevice,
    Launch,
    Limits,
    Program,
    Programs,
    Struct,
    element_launch,
    element_sources,
    instance,
)
from gradserve_server.devices.device import Array
from gradserve_server.ops.activation.spec import LEAKY_RELU_SLOPE, NAMES, SELU_SCALE, SELU_SCALE_ALPHA
from gradserve_server.tensors.spec import MOST_USUAL_FIRST

ARGUMENTS = {
    "forward": Struct(("x", "out"), ("count",)),
    "gradient": Struct(("dy", "saved", "out"), ("count",)),
}
"""The arguments, by kernel."""

_VECTOR_BYTES = 16


def kernel_name(kernel: str, name: str, dtype: np.dtype[Any], width: int) -> str:
    """The name of an instance of a template, for one activation function."""
    return f"{name}_{kernel}_{dtype.name}_by_{width}"


def vector_width(dtype: np.dtype[Any], addresses: Sequence[int]) -> int:
    """The elements that a thread loads at a time: a whole vector if all arrays are aligned, otherwise one."""
    is_aligned = all(address % _VECTOR_BYTES == 0 for address in addresses)
    return _VECTOR_BYTES // dtype.itemsize if is_aligned else 1


@functools.cache
def program(dtype: np.dtype[Any]) -> Program:
    """The kernels for a dtype."""
    widths = (1, _VECTOR_BYTES // dtype.itemsize)
    variants = [(kernel, name, dtype, width) for kernel in ARGUMENTS for name in NAMES for width in widths]
    instances = {kernel_name(*variant): _instance(*variant) for variant in variants}
    parts = [*element_sources(), _constants(), (resources.files(__package__) / "activation.cu").read_text("utf-8")]
    return Program(f"activation {dtype.name}", "\n".join([*parts, *instances.values()]), tuple(instances))


def kernel_launch(kernel: str, name: str, dtype: np.dtype[Any], width: int, count: int, limits: Limits) -> Launch:
    """The launch of a kernel for `count` elements, at least one."""
    return element_launch(kernel_name(kernel, name, dtype, width), count, limits, width=width)


def _constants() -> str:
    numbers = {
        "LEAKY_RELU_SLOPE": LEAKY_RELU_SLOPE,
        "SELU_SCALE": SELU_SCALE,
        "SELU_SCALE_ALPHA": SELU_SCALE_ALPHA,
    }
    return "\n".join(f"constexpr double {name} = {number!r};" for name, number in numbers.items())


def _instance(kernel: str, name: str, dtype: np.dtype[Any], width: int) -> str:
    struct = f"{kernel.title()}Arguments<{ELEMENTS[dtype]}>"
    template = f"{kernel}<{name.title().replace('_', '')}, {width}>"
    return instance(kernel_name(kernel, name, dtype, width), str(ELEMENT_THREADS), struct, template)


class CudaActivation:
    """Activation functions by a kernel for every function, gradient and dtype. Safe to use from several threads."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._programs = Programs(device, program, MOST_USUAL_FIRST)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._programs.prepare(stop)

    def forward(self, name: str, x: Array, out: Array) -> None:
        """Computes an activation function; `out` may be `x`."""
        self._launch("forward", name, (x,), out)

    def gradient(self, name: str, dy: Array, saved: Array, out: Array) -> None:
        """Computes the gradient with respect to the input; `out` may be `dy` or `saved`."""
        self._launch("gradient", name, (dy, saved), out)

    def _launch(self, kernel: str, name: str, inputs: tuple[Array, ...], out: Array) -> None:
        if out.size == 0:
            return
        addresses = [self._device.address(array) for array in (*inputs, out)]
        struct = ARGUMENTS[kernel]
        arguments = struct.of(dict(zip(struct.arrays, addresses, strict=True)), {"count": out.size})
        width = vector_width(out.dtype, addresses)
        launch = kernel_launch(kernel, name, out.dtype, width, out.size, self._device.limits)
        self._programs[out.dtype].launch(launch, arguments)
