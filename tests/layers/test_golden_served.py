"""The layer beside TensorFlow's, through client and server: every recorded case, up to its second update."""

import warnings
from typing import Any

import pytest
from numpy.typing import NDArray

import gradserve
from gradserve import Regularizer
from tests.golden.batch_norm_layer import LayerCase, assert_arrays, assert_call, load_layer_cases
from tests.golden.seeded_layer_inputs import LayerInputs

pytestmark = pytest.mark.usefixtures("_prepared_ops")

IMPLEMENTATIONS = {"slim fused": "FUSED", "core fused": "CORE_FUSED", "core unfused": "CORE", "legacy": "LEGACY"}
GRADIENTS = {"x": "inputs"} | {
    name: name for name in ("beta", "gamma", "batch_weights", "adjustment_scale", "adjustment_bias")
}


def make_layer(client: gradserve.Client, case: LayerCase) -> gradserve.BatchNormLayer:
    arguments: dict[str, Any] = dict(case.arguments)
    plain = arguments.get("param_regularizers") or {}
    kinds = {name: value["regularizer"] for name, value in plain.items()}
    arguments["param_regularizers"] = {name: Regularizer(kind, **scales) for name, (kind, scales) in kinds.items()}
    return client.batch_norm(**arguments)


def call(
    bn: gradserve.BatchNormLayer, step: LayerInputs, is_training: bool
) -> gradserve.BatchNormForward[NDArray[Any]]:
    return bn.forward(step.x, is_training, step.batch_weights, step.adjustment, keep_for_backward=True)


@pytest.mark.parametrize("case", load_layer_cases()[::5], ids=str)  # tests/layers/test_computation.py has all
def test_it_is_tensorflows(client: gradserve.Client, case: LayerCase) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradserve.IgnoredArgumentWarning)
        with make_layer(client, case) as bn:
            first = case.steps[0]
            forward = call(bn, first, case.is_training)
            assert forward.implementation.name == IMPLEMENTATIONS[case.implementation]
            assert set(forward.regularization_losses) == set(case.regularization_losses)
            for name, loss in case.regularization_losses.items():
                assert abs(forward.regularization_losses[name] - loss.expected) <= loss.allowed
            gradients = bn.backward(first.dy, forward)
            found = {name: getattr(gradients, field) for name, field in GRADIENTS.items()}
            assert_call(case.first, forward.outputs, found)
            bn.run_updates()
            if not case.is_training:
                assert_arrays(case.variables[0], bn.get_variables(*case.variables[0]))
                return
            assert_arrays(case.variables[1], bn.variables)
            call(bn, case.steps[1], is_training=True)
            bn.run_updates()
            assert_arrays(case.variables[2], bn.variables)
