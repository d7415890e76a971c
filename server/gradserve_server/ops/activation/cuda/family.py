"""Activation functions on a GPU."""

from collections.abc import Callable

from gradserve_server.devices.cuda.kernels import Programs
from gradserve_server.devices.cuda.program import KernelDevice
from gradserve_server.devices.device import Array
from gradserve_server.ops.activation.cuda import kernels as cuda_kernels
from gradserve_server.ops.dtypes import MOST_USUAL_FIRST


class CudaActivation:
    """Activation functions by a kernel for every function, gradient and dtype. Safe to use from several threads."""

    def __init__(self, device: KernelDevice) -> None:
        """Takes the device to compute on."""
        self._device = device
        self._programs = Programs(device, cuda_kernels.program, MOST_USUAL_FIRST)

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
        struct = cuda_kernels.ARGUMENTS[kernel]
        arguments = struct.of(dict(zip(struct.arrays, addresses, strict=True)), {"count": out.size})
        width = cuda_kernels.vector_width(out.dtype, addresses)
        launch = cuda_kernels.launch(kernel, name, out.dtype, width, out.size, self._device.limits)
        self._programs[out.dtype].launch(launch, arguments)
