"""The reference of FusedBatchNorm beside TensorFlow, and its gradient beside differences."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.ops.batch_norm.reference import fused_batch_norm, fused_batch_norm_grad
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    GradAttributes,
    GradInputs,
    GradOutputs,
    plan_forward,
    plan_gradient,
)
from tests.golden.fused_batch_norm import (
    Case,
    ForwardCase,
    GradientCase,
    assert_output,
    assert_outputs,
    half_ulp,
    load_forward_cases,
    load_gradient_cases,
    load_output_names,
)
from tests.together import together

FORWARD_CASES, GRADIENT_CASES = load_forward_cases(), load_gradient_cases()
CASES: tuple[ForwardCase | GradientCase, ...] = (*FORWARD_CASES, *GRADIENT_CASES)
SHAPES = {"NHWC": (2, 3, 2, 3), "NCHW": (2, 3, 3, 2), "NDHWC": (2, 2, 2, 1, 3), "NCDHW": (2, 3, 2, 1, 2)}
EPSILON = 2.0**-6


def forward(inputs: ForwardInputs, attributes: ForwardAttributes) -> ForwardOutputs:
    return fused_batch_norm(np, inputs, attributes, plan_forward(inputs, attributes).geometry)


def gradient(inputs: GradInputs, attributes: GradAttributes) -> GradOutputs:
    return fused_batch_norm_grad(np, inputs, attributes, plan_gradient(inputs, attributes).geometry)


class TestBesideTensorFlow:
    @together("case", FORWARD_CASES)
    def test_forward(self, case: ForwardCase) -> None:
        outputs = forward(case.inputs, case.attributes)
        assert_outputs(case, outputs)
        self._assert_as_planned(outputs, plan_forward(case.inputs, case.attributes).output_specs)

    @together("case", GRADIENT_CASES)
    def test_gradient(self, case: GradientCase) -> None:
        outputs = gradient(case.inputs, case.attributes)
        assert_outputs(case, outputs)
        self._assert_as_planned(outputs, plan_gradient(case.inputs, case.attributes).output_specs)

    def _assert_as_planned(self, outputs: object, specs: tuple[object, ...]) -> None:
        arrays = vars(outputs).values()
        assert [(a.dtype, a.shape) for a in arrays] == [(s.dtype, s.shape) for s in specs]  # type: ignore[attr-defined]

    @together("case", CASES)
    def test_what_was_recorded_is_near_what_is_expected(self, case: Case) -> None:
        assert set(case.expected) - set(case.recorded) <= {"reserve_space_1", "reserve_space_2"}
        for name, output in case.recorded.items():
            assert_output(case, name, output)


class TestRecording:
    def test_inputs_are_those_that_tensorflow_got(self) -> None:
        assert [case.name for case in CASES if len(set(case.inputs_crc32)) != 1] == []

    def test_every_kind_of_call_is_there(self) -> None:
        kinds = {(type(c), c.dtype, c.attributes.data_format, c.attributes.is_training) for c in CASES}
        assert len(kinds) == 2 * 4 * 4 * 2
        assert {c.attributes.exponential_avg_factor for c in FORWARD_CASES} == {0, 0.3, 1}

    def test_float64_comes_from_float64(self) -> None:
        made_by = {c.made_by for c in CASES if c.dtype == "float64" and c.inputs.x.size}
        assert made_by == {"float64 expressions", "float64 autodiff"}

    def test_versions_differ_in_the_names_of_outputs_alone(self) -> None:
        names = load_output_names()
        assert names["FusedBatchNormV3"] == tuple(ForwardOutputs.__dataclass_fields__)
        assert names["FusedBatchNormGradV3"] == tuple(GradOutputs.__dataclass_fields__)
        assert names["FusedBatchNorm"] == names["FusedBatchNormV2"] == names["FusedBatchNormV3"][:-1]
        assert names["FusedBatchNormGrad"] == names["FusedBatchNormGradV2"]
        assert names["FusedBatchNormGradV2"] == (
            "x_backprop",
            "scale_backprop",
            "offset_backprop",
            "reserve_space_3",
            "reserve_space_4",
        )


class TestComparison:
    """A comparison that lets everything pass would make the tests above worthless."""

    CASE = next(case for case in FORWARD_CASES if case.name == "float32-NHWC-ordinary-training")
    ROUNDED = next(case for case in FORWARD_CASES if case.name == "bfloat16-NHWC-ordinary-training")

    def test_a_larger_error_fails(self) -> None:
        good = forward(self.CASE.inputs, self.CASE.attributes)
        bad = good.y.copy()
        bad[1, 2, 3, 4] += 2e-5 * np.abs(good.y).max()
        with pytest.raises(AssertionError, match="y is off by"):
            assert_outputs(self.CASE, replace(good, y=bad))

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda y: y.astype(np.float64), id="dtype"),
            pytest.param(lambda y: y[..., None], id="shape"),
            pytest.param(lambda y: np.where(y == y.max(), np.nan, y), id="nan"),
            pytest.param(lambda y: np.where(y == y.max(), np.float32(np.inf), y), id="infinity"),
        ],
    )
    def test_anything_else_fails(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
        good = forward(self.CASE.inputs, self.CASE.attributes)
        with pytest.raises(AssertionError):
            assert_outputs(self.CASE, replace(good, y=change(good.y)))

    def test_a_missing_output_fails(self) -> None:
        outputs = dict(vars(forward(self.CASE.inputs, self.CASE.attributes)))
        del outputs["batch_variance"]
        with pytest.raises(AssertionError):
            assert_outputs(self.CASE, outputs)

    def test_16_bits_are_rounded_once(self) -> None:
        good = forward(self.ROUNDED.inputs, self.ROUNDED.attributes)
        twice = good.y.astype(np.float32) * np.float32(1 + 2**-7)
        with pytest.raises(AssertionError, match="y is off by"):
            assert_outputs(self.ROUNDED, replace(good, y=twice.astype(ml_dtypes.bfloat16)))

    @pytest.mark.parametrize(
        ("dtype", "value", "expected"),
        [
            (np.float16, 1.0, 2.0**-11),
            (np.float16, -1.999, 2.0**-11),
            (np.float16, 0.0, 2.0**-25),
            (np.float16, 2.0**-20, 2.0**-25),
            (ml_dtypes.bfloat16, 1.0, 2.0**-8),
            (ml_dtypes.bfloat16, 300.0, 1.0),
        ],
    )
    def test_half_ulp(self, dtype: type, value: float, expected: float) -> None:
        assert half_ulp(np.array([value]), np.dtype(dtype)).tolist() == [expected]


@dataclass(frozen=True)
class Problem:
    """A random linear functional of y: sum(dy y)."""

    inputs: ForwardInputs
    attributes: ForwardAttributes
    dy: NDArray[np.float64]

    @classmethod
    def make(cls, data_format: str, is_training: bool) -> "Problem":
        random = np.random.default_rng(7)
        shape, channels = SHAPES[data_format], 3
        inputs = ForwardInputs(
            x=random.standard_normal(shape),
            scale=random.standard_normal(channels),
            offset=random.standard_normal(channels),
            mean=random.standard_normal(channels),
            variance=random.uniform(0.5, 2, channels),
        )
        attributes = ForwardAttributes(EPSILON, 1.0, data_format, is_training)
        return cls(inputs, attributes, random.standard_normal(shape))

    def value(self, name: str, array: NDArray[np.float64]) -> float:
        return float(np.vdot(self.dy, forward(replace(self.inputs, **{name: array}), self.attributes).y))

    def central_differences(self, name: str, step: float = 1e-5) -> NDArray[np.float64]:
        at: NDArray[np.float64] = getattr(self.inputs, name)
        differences = np.empty(at.shape)
        for index in np.ndindex(at.shape):
            direction = np.zeros(at.shape)
            direction[index] = step
            change = self.value(name, at + direction) - self.value(name, at - direction)
            differences[index] = change / (2 * step)
        return differences

    def gradient(self) -> GradOutputs:
        outputs = forward(self.inputs, self.attributes)
        moments = (
            (outputs.reserve_space_1, outputs.reserve_space_2)
            if self.attributes.is_training
            else (self.inputs.mean, self.inputs.variance)
        )
        attributes = GradAttributes(EPSILON, self.attributes.data_format, self.attributes.is_training)
        return gradient(GradInputs(self.dy, self.inputs.x, self.inputs.scale, *moments), attributes)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("data_format", SHAPES)
@pytest.mark.parametrize("name", ["x", "scale", "offset"])
def test_gradient_beside_differences(name: str, data_format: str, is_training: bool) -> None:
    problem = Problem.make(data_format, is_training)
    backprop = getattr(problem.gradient(), f"{name}_backprop")
    np.testing.assert_allclose(backprop, problem.central_differences(name), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "frozen"])
def test_moments_are_constants_of_the_gradient(is_training: bool) -> None:
    """Any moments are taken as they are: the formula written out for one channel."""
    random = np.random.default_rng(8)
    dy, x = random.standard_normal((2, 2, 3, 3, 1))
    scale, m, v = 1.7, -0.4, 2.5
    attributes = GradAttributes(EPSILON, "NHWC", is_training)
    outputs = gradient(GradInputs(dy, x, np.array([scale]), np.array([m]), np.array([v])), attributes)
    c = 1 / np.sqrt(v + EPSILON)
    np.testing.assert_allclose(outputs.offset_backprop, [dy.sum()], rtol=1e-12)
    np.testing.assert_allclose(outputs.scale_backprop, [(dy * (x - m)).sum() * c], rtol=1e-12)
    slopes = dy - dy.mean() - (x - m) * c**2 * (dy * (x - m)).mean() if is_training else dy
    np.testing.assert_allclose(outputs.x_backprop, scale * c * slopes, rtol=1e-12)


def test_worked_example() -> None:
    """TensorFlow 2.19.1 gave these numbers."""
    inputs = ForwardInputs(
        x=np.arange(12, dtype=np.float32).reshape(2, 1, 3, 2),
        scale=np.array([1, 2], np.float32),
        offset=np.array([0.5, -0.5], np.float32),
        mean=np.array([1, 2], np.float32),
        variance=np.array([4, 9], np.float32),
    )
    outputs = forward(inputs, ForwardAttributes())
    np.testing.assert_allclose(outputs.y.ravel()[:4], [-0.96384, -3.42769, -0.37831, -2.25661], atol=1e-5)
    np.testing.assert_allclose(outputs.batch_mean, [5, 6])
    np.testing.assert_allclose(outputs.batch_variance, [14, 14])
    np.testing.assert_allclose(outputs.reserve_space_1, [5, 6])
    np.testing.assert_allclose(outputs.reserve_space_2, [35 / 3, 35 / 3], rtol=1e-6)
    averaged = forward(inputs, ForwardAttributes(exponential_avg_factor=0.3))
    np.testing.assert_allclose(averaged.batch_mean, [2.2, 3.2], rtol=1e-6)
    np.testing.assert_allclose(averaged.batch_variance, [7, 10.5], rtol=1e-6)
    np.testing.assert_array_equal(averaged.y, outputs.y)
