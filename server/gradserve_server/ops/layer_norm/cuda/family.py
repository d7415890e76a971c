"""LayerNorm and LayerNormGrad on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.kernels import Programs
from gradserve_server.devices.cuda.program import KernelDevice, Launch
from gradserve_server.ops.dtypes import MOST_USUAL_FIRST
from gradserve_server.ops.layer_norm.cuda import kernels as cuda_kernels
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradInputs,
    GradOutputs,
)


class CudaLayerNorm:
    """Computes LayerNorm with a few threads for each group; sums over groups have a block for some columns.

    Sums have a fixed order, so results depend only on the inputs and the kind of GPU. Safe to use from several threads.
    """

    def __init__(self, device: KernelDevice) -> None:
        """Takes the device to compute on."""
        self._device = device
        self._programs = Programs(device, cuda_kernels.program, MOST_USUAL_FIRST)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._programs.prepare(stop)

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes LayerNorm, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        dtype = inputs.x.dtype
        mean, rstd = (self._device.empty(geometry.stats_shape, inputs.scale.dtype) for _ in range(2))
        outputs = ForwardOutputs(self._device.empty(inputs.x.shape, dtype), mean, rstd)
        if geometry.groups > 0:
            addresses = self._addresses(inputs, outputs)
            self._launch_for_groups("forward", dtype, geometry, addresses, {"epsilon": attributes.epsilon})
        return outputs

    def gradient(self, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
        """Computes LayerNormGrad, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        dtype, limits = inputs.x.dtype, self._device.limits
        scale_backprop, offset_backprop = (self._device.empty(inputs.scale.shape, inputs.scale.dtype) for _ in range(2))
        outputs = GradOutputs(self._device.empty(inputs.x.shape, dtype), scale_backprop, offset_backprop)
        if geometry.size == 0:
            return outputs
        addresses = self._addresses(inputs, outputs)
        if geometry.groups > 0:
            self._launch_for_groups("x_gradient", dtype, geometry, addresses, {})
        addresses["partial_sums"] = self._device.scratch(cuda_kernels.partial_bytes(geometry, limits))
        sums, gradient = cuda_kernels.param_launches(geometry, dtype, limits)
        numbers = {
            "groups": geometry.groups,
            "size": geometry.size,
            "splits": cuda_kernels.num_splits(geometry, limits),
        }
        self._launch("param_sums", dtype, sums, addresses, numbers)
        self._launch("param_gradient", dtype, gradient, addresses, numbers)
        return outputs

    def _addresses(self, inputs: Any, outputs: Any) -> dict[str, int]:
        return {name: self._device.address(array) for name, array in (vars(inputs) | vars(outputs)).items()}

    def _launch_for_groups(
        self, kernel: str, dtype: np.dtype[Any], geometry: Geometry, addresses: dict[str, int], floats: dict[str, float]
    ) -> None:
        width = cuda_kernels.vector_width(geometry, dtype, [*addresses.values()])
        launch = cuda_kernels.group_launch(kernel, geometry, dtype, width, self._device.limits)
        numbers = {"groups": geometry.groups, "size": geometry.size}
        numbers["threads_of_group"] = cuda_kernels.threads_of_group(geometry)
        self._launch(kernel, dtype, launch, addresses, numbers | floats)

    def _launch(
        self,
        kernel: str,
        dtype: np.dtype[Any],
        launch: Launch,
        addresses: dict[str, int],
        numbers: dict[str, Any],
    ) -> None:
        """Starts a kernel with the `addresses` and `numbers` that it needs."""
        self._programs[dtype].launch(launch, cuda_kernels.ARGUMENTS[kernel].of(addresses, numbers))
