"""Small calls of every kind, which make a GPU compile what layers need.

Besides the kernels of other families this is CuPy's arithmetic, which is compiled at first use. A first call can take
seconds, but only once for each kind of GPU: CuPy keeps the results on disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array, Device
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.declaration import BatchNormLayerComputation
from gradserve_server.layers.batch_norm.implementation import CallKind, Implementation, choose_implementation
from gradserve_server.layers.batch_norm.saved import Saved
from gradserve_server.layers.batch_norm.spec import (
    CallInputs,
    ForwardAttributes,
    ForwardInputs,
    plan_backward,
    plan_forward,
)
from gradserve_server.layers.batch_norm.updates import UpdateAttributes, UpdateInputs
from gradserve_server.layers.batch_norm.variables import initial_variables, variables_of
from gradserve_server.layers.regularizers import Regularizer
from gradserve_server.ops.dtypes import FLOATING, widened

_SIZE = 3
"""The size of every dimension: CuPy's kernels depend on how many dimensions have more than one element."""
_REGULARIZER = Regularizer("l1_l2", {})
_CLIPPING = {"rmin": 0.5, "rmax": 2.0, "dmax": 1.0}


@dataclass(frozen=True)
class SmallCall:
    """A training forward of inputs [3, 3, 3, 3], its backward and its update.

    Attributes:
        adjustment: The shape of scale and bias; None for no adjustment.
    """

    config: BatchNormConfig
    dtype: np.dtype[Any]
    has_weights: bool = False
    adjustment: tuple[int, ...] | None = None

    @property
    def exists(self) -> bool:
        """True if the implementation takes the dtype, and not in the same way as a wider one."""
        kind = CallKind(4, self.dtype, True, self.has_weights, self.adjustment is not None)
        implementation = choose_implementation(self.config, kind)
        return self.dtype == widened(self.dtype) or self.has_weights or implementation is Implementation.LEGACY

    def compute(self, device: Device, computation: BatchNormLayerComputation) -> None:
        """Computes the call and waits for the results."""
        with device.computing():
            self._compute(device, computation)

    def _compute(self, device: Device, computation: BatchNormLayerComputation) -> None:
        def put(array: NDArray[Any] | None) -> Array | None:
            return None if array is None else device.from_host(array)

        weights = np.ones(_SIZE, np.float32) if self.has_weights else None
        part = None if self.adjustment is None else np.ones(self.adjustment, widened(self.dtype))
        x = device.from_host(np.ones((_SIZE,) * 4, self.dtype))
        given = CallInputs(x, put(weights), put(part), put(part))
        attributes = ForwardAttributes(self.config)
        plan = plan_forward(given, attributes)
        initial = initial_variables(self.config, _SIZE, plan.variable_dtype)
        variables = variables_of({name: device.from_host(array) for name, array in initial.by_name().items()})
        inputs = ForwardInputs.of(given, variables)
        outputs = computation.forward(inputs, attributes, plan)
        saved = Saved.of(inputs, outputs, plan, is_training=True)
        backward, backward_attributes = saved.backward_inputs(x), saved.backward_attributes(self.config)
        computation.backward(backward, backward_attributes, plan_backward(backward, backward_attributes))
        update = UpdateInputs.of(variables.averages, outputs.batch_mean, outputs.batch_variance)
        computation.update(update, UpdateAttributes(self.config, plan.implementation))


def small_calls() -> Iterator[SmallCall]:
    """Yields the calls, common ones first."""
    regularizers = {"beta": _REGULARIZER, "gamma": _REGULARIZER}
    plain = BatchNormConfig(scale=True, fused=False, param_regularizers=regularizers)
    zero_debias = BatchNormConfig(scale=True, fused=False, zero_debias_moving_mean=True)
    renorm = BatchNormConfig(scale=True, renorm=True, renorm_clipping=_CLIPPING)
    old_renorm = BatchNormConfig(scale=True, renorm=True, renorm_clipping=_CLIPPING, renorm_zero_debias=True)
    # The axis of the channels matters only for weights and adjustments.
    adjusted = [BatchNormConfig(scale=True, data_format=data_format) for data_format in ("NHWC", "NCHW")]
    shapes = ((_SIZE,), (_SIZE, 1, 1, 1), (_SIZE,) * 4)
    for dtype in sorted(FLOATING, key=lambda dtype: dtype != np.float32):
        calls = [SmallCall(config, dtype) for config in (plain, zero_debias, renorm, old_renorm)]
        calls += [SmallCall(config, dtype, has_weights=True) for config in adjusted]
        calls += [SmallCall(config, dtype, adjustment=shape) for config in adjusted for shape in shapes]
        yield from (call for call in calls if call.exists)
