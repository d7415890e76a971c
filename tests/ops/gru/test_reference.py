"""The reference of GRUBlockCell beside TensorFlow, and its gradient beside differences."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.ops.activation.reference import sigmoid
from gradserve_server.ops.gru.reference import gru_block_cell, gru_block_cell_grad
from gradserve_server.ops.gru.spec import CellInputs, CellOutputs, GradAttributes, GradOutputs
from tests.golden.gru_block_cell import (
    Case,
    ForwardCase,
    GradientCase,
    assert_output,
    assert_outputs,
    load_checksums,
    load_forward_cases,
    load_gradient_cases,
)
from tests.golden.seeded_gru_inputs import CELLS

FORWARD_CASES, GRADIENT_CASES = load_forward_cases(), load_gradient_cases()
ALL = GradAttributes(weight_gradients=True)
WEIGHT_GRADIENTS = ("d_w_ru", "d_w_c", "d_b_ru", "d_b_c")


class TestBesideTensorFlow:
    @pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
    def test_cell(self, case: ForwardCase) -> None:
        outputs = gru_block_cell(np, case.inputs, case.plan.sizes)
        assert_outputs(case, outputs)
        self._assert_as_planned(case, outputs)

    @pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
    def test_gradient(self, case: GradientCase) -> None:
        outputs = gru_block_cell_grad(np, case.inputs, ALL, case.plan.sizes)
        assert_outputs(case, outputs)
        self._assert_as_planned(case, outputs)

    def _assert_as_planned(self, case: ForwardCase | GradientCase, outputs: CellOutputs | GradOutputs) -> None:
        arrays = vars(outputs).values()
        assert [(a.dtype, a.shape) for a in arrays] == [(s.dtype, s.shape) for s in case.plan.output_specs]

    @pytest.mark.parametrize("case", [c for c in (*FORWARD_CASES, *GRADIENT_CASES) if c.recorded], ids=str)
    def test_what_was_recorded_is_near_what_is_expected(self, case: Case) -> None:
        for name, output in case.recorded.items():
            assert_output(case, name, output)


class TestRecording:
    def test_inputs_are_those_that_tensorflow_got(self) -> None:
        assert [name for name, checksums in load_checksums().items() if len(set(checksums)) != 1] == []

    def test_all_that_tensorflow_computes_is_there(self) -> None:
        names = ["d_x", "d_h_prev", "d_c_bar", "d_r_bar_u_bar"]
        for case in FORWARD_CASES:
            assert list(case.recorded) == ([] if case.dtype.endswith("16") else ["r", "u", "c", "h"])
        for gradient in GRADIENT_CASES:
            unwritten = 1 if "no_cells" in gradient.name else 0
            wanted = {"float32": names[unwritten:], "float64": [*names, *WEIGHT_GRADIENTS]}
            assert list(gradient.recorded) == wanted.get(gradient.dtype, [])

    def test_cells_are_as_named(self) -> None:
        names = {str(case) for case in GRADIENT_CASES}
        assert len(names) == len(GRADIENT_CASES) == (4 + 3) * len(CELLS)


class TestComparison:
    """A comparison that lets everything pass would make the tests above worthless."""

    CASE = next(case for case in FORWARD_CASES if case.name == "float32-ordinary-forward")

    def changed(self, change: Any) -> CellOutputs:
        good = gru_block_cell(np, self.CASE.inputs, self.CASE.plan.sizes)
        return replace(good, h=change(good.h.copy()))

    def test_what_is_right_passes(self) -> None:
        assert_outputs(self.CASE, self.changed(lambda h: h))

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda h: h.astype(np.float64), id="dtype"),
            pytest.param(lambda h: h[..., None], id="shape"),
            pytest.param(lambda h: np.where(h == h.max(), np.float32(np.nan), h), id="nan"),
            pytest.param(lambda h: np.where(h == h.min(), h + np.float32(2e-5) * np.abs(h).max(), h), id="number"),
        ],
    )
    def test_what_is_wrong_fails(self, change: Any) -> None:
        with pytest.raises(AssertionError):
            assert_outputs(self.CASE, self.changed(change))

    def test_a_missing_output_fails(self) -> None:
        outputs = dict(vars(self.changed(lambda h: h)))
        del outputs["u"]
        with pytest.raises(AssertionError):
            assert_outputs(self.CASE, outputs)


class TestBesideDifferences:
    """The loss is the sum of h d_h."""

    FORWARD = next(case for case in FORWARD_CASES if case.name == "float64-ordinary-forward")
    GRADIENT = next(case for case in GRADIENT_CASES if case.name == "float64-ordinary-gradient")
    INPUTS, SIZES = FORWARD.inputs, FORWARD.plan.sizes
    STEP = 1e-6

    def loss(self, inputs: CellInputs) -> float:
        return float((gru_block_cell(np, inputs, self.SIZES).h * self.GRADIENT.inputs.d_h).sum())

    def central_differences(self, name: str) -> NDArray[np.float64]:
        array = getattr(self.INPUTS, name)
        differences: NDArray[np.float64] = np.empty_like(array)
        for index in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[index] = self.STEP
            above, below = (self.loss(replace(self.INPUTS, **{name: array + sign * step})) for sign in (1, -1))
            differences[index] = (above - below) / (2 * self.STEP)
        return differences

    @pytest.mark.parametrize("name", list(CellInputs.__dataclass_fields__))
    def test_of_each_input(self, name: str) -> None:
        outputs = gru_block_cell_grad(np, self.GRADIENT.inputs, ALL, self.SIZES)
        np.testing.assert_allclose(getattr(outputs, f"d_{name}"), self.central_differences(name), rtol=1e-6, atol=1e-8)


def test_weight_gradients_are_computed_when_they_are_wanted() -> None:
    case = next(case for case in GRADIENT_CASES if case.name == "float32-odd-gradient")
    outputs = gru_block_cell_grad(np, case.inputs, GradAttributes(), case.plan.sizes)
    assert [getattr(outputs, name) for name in WEIGHT_GRADIENTS] == [None] * 4


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0.0, 0.5), (1000.0, 1.0), (-1000.0, 0.0), (np.inf, 1.0), (-np.inf, 0.0), (-40.0, np.exp(-40.0))],
)
def test_sigmoid_far_out(x: float, expected: float) -> None:
    np.testing.assert_allclose(sigmoid(np, np.array([x])), [expected], rtol=1e-15)
