"""Batch normalization on a GPU."""

import functools
import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.kernels import Programs
from gradserve_server.devices.cuda.program import KernelDevice
from gradserve_server.ops.batch_norm.cuda import launches
from gradserve_server.ops.batch_norm.cuda.launches import LaunchPlan, Operation
from gradserve_server.ops.batch_norm.cuda.tiling import VECTOR_BYTES
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradAttributes,
    GradInputs,
    GradOutputs,
)
from gradserve_server.ops.dtypes import MOST_USUAL_FIRST, widened

_KEPT_PLANS = 1024
_INPUTS = {operation: attrgetter(*names) for operation, names in launches.INPUTS.items()}
_OUTPUTS = {operation: attrgetter(*names) for operation, names in launches.OUTPUTS.items()}


class CudaBatchNorm:
    """FusedBatchNorm and FusedBatchNormGrad by kernels of our own. Safe to use from several threads.

    Sums are in U and always in the same order, so results depend only on the inputs and on the kind of GPU. Numbers
    below the normal range of U count as zero.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._plan_forward = functools.lru_cache(_KEPT_PLANS)(launches.plan_forward)
        self._plan_gradient = functools.lru_cache(_KEPT_PLANS)(launches.plan_gradient)
        self._programs = Programs(
            device, lambda key: launches.program(key[1], key[0]), itertools.product(MOST_USUAL_FIRST, launches.KERNELS)
        )

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._programs.prepare(stop)

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes FusedBatchNorm, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        x, param_dtype = inputs.x, inputs.scale.dtype
        per_channel = (geometry.channels,)
        outputs = ForwardOutputs(
            y=self._device.empty(x.shape, x.dtype),
            batch_mean=self._device.empty(per_channel, param_dtype),
            batch_variance=self._device.empty(per_channel, param_dtype),
            reserve_space_1=self._device.empty(per_channel, param_dtype),
            reserve_space_2=self._device.empty(per_channel, param_dtype),
            reserve_space_3=self._device.empty((), param_dtype),
        )
        addresses = self._addresses("forward", inputs, outputs)
        plan = self._plan_forward(geometry, x.dtype, attributes, _are_aligned(addresses), self._device.limits)
        self._run(plan, x.dtype, addresses)
        return outputs

    def gradient(self, inputs: GradInputs, attributes: GradAttributes, geometry: Geometry) -> GradOutputs:
        """Computes FusedBatchNormGrad, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        x, param_dtype = inputs.x, inputs.scale.dtype
        per_channel = (geometry.channels,)
        outputs = GradOutputs(
            x_backprop=self._device.empty(x.shape, x.dtype),
            scale_backprop=self._device.empty(per_channel, param_dtype),
            offset_backprop=self._device.empty(per_channel, param_dtype),
            reserve_space_4=self._device.empty((0,), param_dtype),
            reserve_space_5=self._device.empty((0,), param_dtype),
        )
        addresses = self._addresses("gradient", inputs, outputs)
        plan = self._plan_gradient(geometry, x.dtype, attributes, _are_aligned(addresses), self._device.limits)
        self._run(plan, x.dtype, addresses)
        return outputs

    def _addresses(self, operation: Operation, inputs: Any, outputs: Any) -> list[int]:
        arrays = (*_INPUTS[operation](inputs), *_OUTPUTS[operation](outputs))
        return [self._device.address(array) for array in arrays]

    def _run(self, plan: LaunchPlan, dtype: np.dtype[Any], addresses: list[int]) -> None:
        partial_sums = tickets = 0
        if plan.num_partial_sums:
            itemsize = widened(dtype).itemsize
            partial_sums = self._device.scratch(plan.num_partial_sums * itemsize)
            tickets = self._device.tickets(plan.num_tickets)
        arguments = plan.with_addresses([*addresses, partial_sums, tickets])
        program = self._programs[dtype, plan.operation]
        for launch in plan.launches:
            program.launch(launch, arguments)


def _are_aligned(addresses: list[int]) -> bool:
    """True if vectors can be loaded from all addresses; false only if an array is part of another one."""
    return all(address % VECTOR_BYTES == 0 for address in addresses)
