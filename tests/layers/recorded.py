"""Layers beside TensorFlow's, call by call, wherever they are computed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.spec import Implementation
from tests.golden.batch_norm_layer import Call, LayerCase, assert_arrays, assert_call
from tests.golden.seeded_layer_inputs import LayerInputs
from tests.layers.bench import LayerBench, backward, forward, release, run_updates

IMPLEMENTATIONS = {
    "slim fused": Implementation.FUSED,
    "core fused": Implementation.CORE_FUSED,
    "core unfused": Implementation.CORE,
    "legacy": Implementation.LEGACY,
}
GRADIENTS = {
    "x": "inputs_gradient",
    "beta": "beta_gradient",
    "gamma": "gamma_gradient",
    "batch_weights": "batch_weights_gradient",
    "adjustment_scale": "adjustment_scale_gradient",
    "adjustment_bias": "adjustment_bias_gradient",
}


def check_recorded(case: LayerCase, make_bench: Callable[[], LayerBench], most_updates: int = 10) -> None:
    """Makes the recorded calls: the first one, updates, and the last ones if all updates are made."""
    arguments: dict[str, Any] = dict(case.arguments)
    in_place = "updates_collections" in arguments and arguments["updates_collections"] is None
    # In place, a forward changes variables: another layer makes the first call.
    bench = make_bench()
    layer = bench.layer(**arguments)
    first = case.steps[0]
    made = forward(layer, first.x, case.is_training, first.batch_weights, first.adjustment)
    assert made.implementation is IMPLEMENTATIONS[case.implementation]
    losses = {name: np.asarray(loss, np.float64) for name, loss in made.regularization_losses.items()}
    assert set(losses) == set(case.regularization_losses)
    for name, loss in case.regularization_losses.items():
        assert abs(losses[name] - loss.expected) <= loss.allowed
    gradients = vars(backward(layer, made.forward_id, first.dy))
    assert_call(case.first, made.outputs, {name: gradients[field] for name, field in GRADIENTS.items()})
    bench = make_bench()
    layer = bench.layer(**arguments)
    if not case.is_training:
        forward(layer, first.x, False, first.batch_weights, first.adjustment)
        # TensorFlow makes no others for a layer that is never trained.
        assert_arrays(case.variables[0], bench.variables(layer, list(case.variables[0])))
        return
    for number, step in enumerate(case.steps[:most_updates], start=1):
        if number == len(case.steps) and case.last is not None and not in_place:
            _check_call(layer, case.last, step, is_training=True)
        _step(layer, step)
        if number in case.variables:
            assert_arrays(case.variables[number], bench.variables(layer))
    if case.inference is not None and most_updates >= len(case.steps):
        _check_call(layer, case.inference, first, is_training=False)


def _check_call(layer: BatchNormLayer, expected: Call, step: LayerInputs, is_training: bool) -> None:
    """Makes a call whose updates are not run."""
    made = forward(layer, step.x, is_training, step.batch_weights, step.adjustment)
    gradients = vars(backward(layer, made.forward_id, step.dy))
    release(layer, made.forward_id)
    assert_call(expected, made.outputs, {name: gradients[field] for name, field in GRADIENTS.items()})


def _step(layer: BatchNormLayer, step: LayerInputs) -> None:
    made = forward(layer, step.x, True, step.batch_weights, step.adjustment)
    run_updates(layer)
    release(layer, made.forward_id)
