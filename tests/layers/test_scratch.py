"""Layers take no more memory besides inputs and outputs than they reserve."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.layers.batch_norm.computation import BACKWARD, FORWARD, make_layer_families
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.events import Saved
from gradserve_server.layers.batch_norm.spec import CallInputs, ForwardAttributes, ForwardInputs, plan_forward
from gradserve_server.layers.batch_norm.variables import initial_variables, variables_of
from gradserve_server.ops.registry import make_families
from gradserve_server.ops.runner import CheckedCall, check_call
from tests.ops.test_scratch import TracedDevice

_PYTHON_BYTES = 1 << 14

SHAPE = (32, 16, 16, 8)

CALLS: dict[str, tuple[BatchNormConfig, dict[str, tuple[int, ...]]]] = {
    "plain": (BatchNormConfig(scale=True), {}),
    "an activation": (BatchNormConfig(activation_fn="tanh"), {}),
    "renorm": (BatchNormConfig(renorm=True), {}),
    "weights": (BatchNormConfig(scale=True), {"batch_weights": SHAPE[:1]}),
    "an adjustment of every element": (
        BatchNormConfig(scale=True),
        {"adjustment_scale": SHAPE, "adjustment_bias": SHAPE},
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("given", CALLS)
def test_forward_and_backward(given: str, dtype: Any) -> None:
    config, shapes = CALLS[given]
    parallel, device = ForkJoin(1), TracedDevice()
    ops = make_families(device, parallel)
    for name in ("batch_norm", "activation"):
        ops[name].prepare(lambda: False)
    family = make_layer_families(device, ops)[FORWARD.family]
    inputs = CallInputs(np.ones(SHAPE, dtype), **{name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    attributes = ForwardAttributes(config)
    plan = plan_forward(inputs, attributes)
    initial = initial_variables(config, SHAPE[-1], plan.variable_dtype)
    forward_inputs = ForwardInputs.of(inputs, variables_of(initial.by_name()))
    forward = CheckedCall(FORWARD, forward_inputs, attributes, plan)
    outputs = _measured(forward, lambda: FORWARD.compute(family, forward_inputs, attributes, plan))
    saved = Saved.of(forward_inputs, outputs, plan, is_training=True)
    backward = check_call(BACKWARD, saved.backward_inputs(inputs.inputs), saved.backward_attributes(config))
    _measured(backward, lambda: BACKWARD.compute(family, backward.inputs, backward.attributes, backward.plan))
    parallel.close()


def _measured(call: CheckedCall[Any, Any, Any, Any], compute: Callable[[], Any]) -> Any:
    """Returns the outputs; fails if they took more than the call reserves."""
    tracemalloc.start()
    try:
        outputs = compute()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= call.output_bytes + call.scratch_bytes + _PYTHON_BYTES
    return outputs
