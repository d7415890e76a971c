"""What was recorded of the batch_norm layer: that it is whole, and that the comparison with it means something."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.golden.batch_norm_layer import (
    LayerCase,
    assert_arrays,
    assert_call,
    assert_output,
    load_layer_cases,
    load_versions,
)
from tests.golden.batch_norm_layer_calls import CALLS, IMPLEMENTATIONS
from tests.golden.batch_norm_layer_errors import load_refusals, load_taken
from tests.golden.seeded_inputs import DTYPES
from tests.golden.seeded_layer_inputs import RECORDED_UPDATES, LayerCall
from tests.together import together

CASES = load_layer_cases()
for_every_case = together("call, case", CALLS, CASES)


class TestRecording:
    def test_inputs_are_those_that_tensorflow_got(self) -> None:
        assert [case.name for case in CASES if len(set(case.inputs_crc32)) != 1] == []

    def test_versions(self) -> None:
        assert load_versions() == {"tensorflow": "2.13.1", "tf_slim": "1.1.0", "numpy": "1.24.3"}

    def test_names_are_unique(self) -> None:
        assert len({case.name for case in CASES}) == len(CASES)

    def test_every_implementation_has_every_dtype(self) -> None:
        recorded = {(case.implementation, case.dtype) for case in CASES}
        # What is fused does not take float64.
        fused_in_float64 = {("slim fused", "float64"), ("core fused", "float64")}
        assert recorded == {(name, dtype) for name in IMPLEMENTATIONS for dtype in DTYPES} - fused_in_float64

    def test_every_implementation_has_every_rank_and_layout_that_it_takes(self) -> None:
        recorded = {
            (case.implementation, case.steps[0].x.ndim, case.arguments.get("data_format", "NHWC")) for case in CASES
        }
        ranks = {"slim fused": (2, 4), "core fused": (4, 5), "core unfused": (2, 3, 4, 5), "legacy": (2, 3, 4, 5)}
        assert recorded == {
            (name, rank, layout) for name in ranks for rank in ranks[name] for layout in ("NHWC", "NCHW")
        }

    @together("case", CASES)
    def test_what_was_recorded_is_near_what_is_expected(self, case: LayerCase) -> None:
        for output in case.outputs:
            assert_output(output, output.recorded)


class TestOutputs:
    """Every case has the outputs that its arguments lead to."""

    @for_every_case
    def test_calls(self, call: LayerCall, case: LayerCase) -> None:
        assert len(case.steps) == (10 if call.is_training else 1)
        assert (case.inference is not None) == call.is_training
        assert (case.last is not None) == (call.is_training and "renorm" in case.arguments)

    @for_every_case
    def test_gradients(self, call: LayerCall, case: LayerCase) -> None:
        inputs, arguments = case.steps[0], case.arguments
        of_params = {"beta": arguments.get("center", True), "gamma": arguments["scale"]}
        always = {"x"} | {name for name, there in of_params.items() if there}
        training = set(always)
        if call.batch_weights not in (None, "integers"):
            training |= {"batch_weights"}
        if call.adjustment and case.implementation == "core unfused":
            training |= {"adjustment_scale", "adjustment_bias"}
        for recorded in (case.first, case.last, case.inference):
            if recorded is None:
                continue
            is_training = recorded is not case.inference and call.is_training
            assert set(recorded.gradients) == (training if is_training else always)
            assert (recorded.y.recorded.dtype, recorded.y.recorded.shape) == (inputs.x.dtype, inputs.x.shape)

    @for_every_case
    def test_variables(self, call: LayerCall, case: LayerCase) -> None:
        names = {"moving_mean", "moving_variance"} | set(case.first.gradients) & {"beta", "gamma"}
        if "renorm" in case.arguments:
            names |= {"moving_stddev", "renorm_mean", "renorm_stddev"}
        if "zero_debias_moving_mean" in case.arguments and call.is_training:
            names |= {"moving_mean/biased", "moving_mean/local_step"}
        assert tuple(case.variables) == (RECORDED_UPDATES if call.is_training else (0,))
        own = case.dtype == "float64" or case.implementation == "legacy"
        for variables in case.variables.values():
            assert set(variables) == names
            assert {v.recorded.dtype for v in variables.values()} == {DTYPES[case.dtype if own else "float32"]}

    @for_every_case
    def test_initial_values(self, call: LayerCall, case: LayerCase) -> None:
        for name, array in case.arguments.get("param_initializers", {}).items():
            if name in case.variables[0]:
                np.testing.assert_array_equal(case.variables[0][name].expected, array)

    @for_every_case
    def test_regularization_losses(self, call: LayerCall, case: LayerCase) -> None:
        regularized = set(case.arguments.get("param_regularizers", {})) & set(case.variables[0])
        assert set(case.regularization_losses) == (set() if case.implementation == "legacy" else regularized)


class TestUpdates:
    """That update k is of step k - 1, and what fused implementations average."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_moving_averages(self, implementation: str) -> None:
        shown = ("renorm", "zero_debias_moving_mean", "trainable")
        chosen = [
            (call, case)
            for call, case in zip(CALLS, CASES, strict=True)
            if call.is_training and case.implementation == implementation and call.batch_weights is None
            if case.dtype == "float32" and not any(name in case.arguments for name in shown)
        ]
        for call, case in chosen:
            decay, axes = case.arguments["decay"], tuple(a for a in range(len(call.shape)) if a != call.axis)
            elements = case.steps[0].x.size // call.shape[call.axis]
            correction = elements / max(elements - 1, 1) if implementation.endswith(" fused") else 1.0
            averages = {name: case.variables[0][name].expected for name in ("moving_mean", "moving_variance")}
            for updates, step in enumerate(case.steps[:2], 1):
                x = step.x.astype(np.float64)
                values = {"moving_mean": np.mean(x, axes), "moving_variance": np.var(x, axes) * correction}
                averages = {name: decay * averages[name] + (1 - decay) * values[name] for name in values}
                recorded = {name: case.variables[updates][name] for name in averages}
                assert_arrays(recorded, {name: array.astype(np.float32) for name, array in averages.items()})
        assert len(chosen) > 10

    def test_the_core_layer_does_not_update_what_is_not_trainable(self) -> None:
        updated = {}
        for case in CASES:
            if not case.arguments.get("trainable", True):
                before, after = (case.variables[count]["moving_mean"].recorded for count in (0, 10))
                updated[case.implementation] = not np.array_equal(before, after)
        assert updated == {"slim fused": True, "core fused": False, "core unfused": False, "legacy": True}


class TestComparison:
    """A comparison that lets everything pass would make tests with it worthless."""

    CASE = next(case for case in CASES if case.name == "float32, 5x3 NHWC, training: fused=None")

    @pytest.mark.parametrize(
        "change",
        [
            lambda y: y + np.float32(1e-4),
            lambda y: y * np.float32("nan"),
            lambda y: y.astype(np.float64),
            lambda y: y[:1],
        ],
    )
    def test_another_array_fails(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        y = self.CASE.first.y
        assert_output(y, y.recorded)
        with pytest.raises(AssertionError):
            assert_output(y, change(y.recorded))

    def test_a_missing_and_an_additional_gradient_fail(self) -> None:
        first = self.CASE.first
        gradients = {name: output.recorded for name, output in first.gradients.items()}
        assert_call(first, first.y.recorded, {**gradients, "batch_weights": None})
        with pytest.raises(AssertionError):
            assert_call(first, first.y.recorded, {**gradients, "x": None})
        with pytest.raises(AssertionError):
            assert_call(first, first.y.recorded, {**gradients, "batch_weights": gradients["x"]})

    def test_what_is_allowed_is_little(self) -> None:
        relative = {"float64": 1e-9, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
        for case in CASES:
            for output in (case.first.y, *case.variables[0].values()):
                largest = np.max(np.abs(output.expected), initial=0)
                assert np.max(output.allowed) <= relative[case.dtype] * max(largest, 0.1), (case.name, output.name)

    def test_another_number_of_updates_fails(self) -> None:
        for case in CASES:
            if case.is_training and case.arguments["decay"] == 0.9 and case.arguments.get("trainable", True):
                with pytest.raises(AssertionError):
                    assert_arrays(case.variables[2], {n: o.recorded for n, o in case.variables[1].items()})


class TestRefusals:
    def test_names_are_unique(self) -> None:
        names = [refusal.name for refusal in (*load_refusals(), *load_taken())]
        assert len(set(names)) == len(names)

    def test_types(self) -> None:
        assert {refusal.error_type for refusal in load_refusals()} == {"ValueError", "TypeError"}
        assert {refusal.error_type for refusal in load_taken()} == {None}

    def test_data_format_is_checked_first(self) -> None:
        texts = {refusal.text for refusal in load_refusals() if refusal.name.startswith("data_format")}
        assert texts == {"data_format has to be either NCHW or NHWC."}

    def test_inputs(self) -> None:
        refusal = next(refusal for refusal in load_refusals() if refusal.name == "too many batch_weights")
        (call,) = refusal.calls
        assert call.x.shape == (5, 3)
        assert call.batch_weights is not None
        assert call.batch_weights.shape == (6,)
        assert refusal.text == "Shapes (5,) and (6,) are incompatible"
