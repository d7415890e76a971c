"""The reference of LayerNorm beside PyTorch, and its gradient beside differences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.ops.layer_norm.reference import layer_norm, layer_norm_grad
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    GradAttributes,
    GradInputs,
    GradOutputs,
    plan_forward,
    plan_gradient,
)
from tests.golden.layer_norm import PYTORCH_ERRORS, Case, assert_output, assert_outputs, load_cases
from tests.golden.seeded_inputs import DTYPES

CASES = load_cases()
by_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _numbers_may_be_nan() -> Any:
    with np.errstate(all="ignore"):
        yield


class TestBesidePyTorch:
    @by_case
    def test_forward(self, case: Case) -> None:
        outputs = layer_norm(np, case.inputs, case.attributes, case.geometry)
        assert_outputs(case, outputs)
        self._assert_as_planned(outputs, plan_forward(case.inputs, case.attributes).output_specs)

    @by_case
    def test_gradient(self, case: Case) -> None:
        outputs = layer_norm_grad(np, case.grad_inputs, case.geometry)
        assert_outputs(case, outputs)
        self._assert_as_planned(outputs, plan_gradient(case.grad_inputs, GradAttributes()).output_specs)

    def _assert_as_planned(self, outputs: ForwardOutputs | GradOutputs, specs: Any) -> None:
        arrays = vars(outputs).values()
        assert [(a.dtype, a.shape) for a in arrays] == [(s.dtype, s.shape) for s in specs]

    @by_case
    def test_what_was_recorded_is_near_what_is_expected(self, case: Case) -> None:
        assert list(case.recorded) == list(case.expected)
        for name, output in case.recorded.items():
            assert_output(case, name, output, PYTORCH_ERRORS[case.dtype])


class TestRecording:
    def test_inputs_are_those_that_pytorch_got(self) -> None:
        assert [case.name for case in CASES if len(set(case.inputs_crc32)) != 1] == []

    def test_every_kind_of_call_is_there(self) -> None:
        ranks = {(case.dtype, case.inputs.x.ndim, case.inputs.scale.ndim) for case in CASES}
        assert {(dtype, 3 + rank // 3, rank) for dtype in DTYPES for rank in (1, 2, 3)} <= ranks
        assert {case.geometry.groups for case in CASES} > {0, 1, 130}
        assert {case.geometry.size for case in CASES} > {0, 1, 1029}

    def test_inputs_are_the_same_numbers_in_every_dtype(self) -> None:
        wide = {case.name.partition("-")[2]: case.inputs for case in CASES if case.dtype == "float64"}
        for case in CASES:
            for name, array in vars(case.inputs).items():
                np.testing.assert_array_equal(array, getattr(wide[case.name.partition("-")[2]], name))


class TestComparison:
    """A comparison that lets everything pass would make the tests above worthless."""

    CASE = next(case for case in CASES if case.name == "float32-odd")

    def changed(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> ForwardOutputs:
        good = layer_norm(np, self.CASE.inputs, self.CASE.attributes, self.CASE.geometry)
        return replace(good, y=change(good.y))

    def test_what_is_right_passes(self) -> None:
        assert_outputs(self.CASE, self.changed(lambda y: y))

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda y: y.astype(np.float64), id="dtype"),
            pytest.param(lambda y: y[..., None], id="shape"),
            pytest.param(lambda y: np.where(y == y.max(), np.float32(np.nan), y), id="nan"),
            pytest.param(lambda y: np.where(y == y.min(), y + np.float32(2e-5) * np.abs(y).max(), y), id="number"),
        ],
    )
    def test_what_is_wrong_fails(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        with pytest.raises(AssertionError):
            assert_outputs(self.CASE, self.changed(change))

    def test_a_missing_output_fails(self) -> None:
        outputs = dict(vars(self.changed(lambda y: y)))
        del outputs["rstd"]
        with pytest.raises(AssertionError):
            assert_outputs(self.CASE, outputs)


class TestBesideDifferences:
    """The loss is the sum of dy y."""

    ATTRIBUTES = ForwardAttributes(2.0**-6)
    X, DY = np.random.default_rng(7).standard_normal((2, 2, 3, 2, 4))
    SCALE, OFFSET = np.random.default_rng(8).standard_normal((2, 2, 4))
    INPUTS = ForwardInputs(X, SCALE, OFFSET)
    GEOMETRY = plan_forward(INPUTS, ATTRIBUTES).geometry
    STEP = 1e-5

    def loss(self, inputs: ForwardInputs) -> float:
        return float(np.vdot(self.DY, layer_norm(np, inputs, self.ATTRIBUTES, self.GEOMETRY).y))

    def central_differences(self, name: str) -> NDArray[np.float64]:
        array = getattr(self.INPUTS, name)
        differences: NDArray[np.float64] = np.empty_like(array)
        for index in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[index] = self.STEP
            above, below = (self.loss(replace(self.INPUTS, **{name: array + sign * step})) for sign in (1, -1))
            differences[index] = (above - below) / (2 * self.STEP)
        return differences

    @pytest.mark.parametrize("name", ["x", "scale", "offset"])
    def test_of_each_input(self, name: str) -> None:
        forward = layer_norm(np, self.INPUTS, self.ATTRIBUTES, self.GEOMETRY)
        inputs = GradInputs(self.DY, self.INPUTS.x, self.INPUTS.scale, forward.mean, forward.rstd)
        outputs = layer_norm_grad(np, inputs, self.GEOMETRY)
        np.testing.assert_allclose(
            getattr(outputs, f"{name}_backprop"), self.central_differences(name), rtol=1e-7, atol=1e-8
        )


def test_mean_and_rstd_are_constants_of_the_gradient() -> None:
    """Any are taken as they are: the formula written out for one group."""
    random = np.random.default_rng(8)
    dy, x, scale = random.standard_normal((3, 5))
    mean, rstd = -0.4, 2.5
    inputs = GradInputs(dy, x, scale, np.array(mean), np.array(rstd))
    outputs = layer_norm_grad(np, inputs, plan_gradient(inputs, GradAttributes()).geometry)
    normalized, g = (x - mean) * rstd, dy * scale
    np.testing.assert_allclose(outputs.offset_backprop, dy, rtol=1e-12)
    np.testing.assert_allclose(outputs.scale_backprop, dy * normalized, rtol=1e-12)
    expected = rstd * (g - g.mean() - normalized * (g * normalized).mean())
    np.testing.assert_allclose(outputs.x_backprop, expected, rtol=1e-12)
