"""The reference of CudnnRNN beside PyTorch, and its gradients beside differences."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.ops.cudnn_rnn.cpu.family import dropout_masks
from gradserve_server.ops.cudnn_rnn.declaration import make_network, plan_forward
from gradserve_server.ops.cudnn_rnn.spec import BackpropOutputs, ForwardAttributes, ForwardInputs, Problem
from tests.golden.cudnn_rnn import Case, assert_output, assert_outputs, load_cases, relative_error
from tests.ops.cudnn_rnn.reference import OutputGradients, Trace, cudnn_rnn, cudnn_rnn_backprop
from tests.together import together

Given = TypeVar("Given", NDArray[Any], NDArray[Any] | None)

CASES = load_cases()
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
DIRECTIONS = ("unidirectional", "bidirectional")
STEPS, BATCH, LAYERS = 4, 3, 2
LENGTHS = np.array([2, 4, 1], np.int32)


def forward_outputs(trace: Trace) -> dict[str, NDArray[Any]]:
    return {name: getattr(trace, name) for name in ("output", "output_h", "output_c")}


class TestBesidePyTorch:
    @together("case", CASES)
    def test_outputs(self, case: Case) -> None:
        trace = cudnn_rnn(np, case.inputs, case.problem)
        assert_outputs(case, forward_outputs(trace))
        backprop = cudnn_rnn_backprop(np, case.inputs, case.gradients, trace, case.problem)
        assert_outputs(case, backprop)
        planned = plan_forward(case.inputs, case.attributes).output_specs[:3]
        assert [(a.dtype, a.shape) for a in forward_outputs(trace).values()] == [(s.dtype, s.shape) for s in planned]
        assert all(array.flags.c_contiguous for array in (*forward_outputs(trace).values(), *vars(backprop).values()))

    @together("case", [case for case in CASES if case.recorded])
    def test_what_was_recorded_is_near_what_is_expected(self, case: Case) -> None:
        assert list(case.recorded) == list(case.expected)
        for name, output in case.recorded.items():
            assert_output(case, name, output)


class TestRecording:
    def test_inputs_are_those_that_pytorch_got(self) -> None:
        assert [case.name for case in CASES if len(set(case.inputs_crc32)) != 1] == []

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_inputs_are_the_same_numbers_in_every_dtype(self, dtype: str) -> None:
        by_name = {case.name: case for case in CASES}
        for narrow in (case for case in CASES if case.dtype == dtype):
            wide = by_name[narrow.name.replace(dtype, "float64")]
            for kind in ("inputs", "gradients"):
                for name, array in vars(getattr(narrow, kind)).items():
                    if array is not None:
                        np.testing.assert_array_equal(array.astype(np.float64), getattr(getattr(wide, kind), name))

    def test_every_kind_of_call_is_there(self) -> None:
        kinds = {
            (
                case.dtype,
                case.attributes.time_major,
                case.attributes.rnn_mode,
                case.attributes.direction,
                case.problem.network.num_layers,
                case.problem.network.num_proj,
                case.inputs.sequence_lengths is not None,
            )
            for case in CASES
            if not case.problem.network.skip_input
        }
        orders = [(d, True) for d in ("float16", "bfloat16", "float32", "float64")]
        orders += [("float32", False), ("float64", False)]
        assert len(kinds) == len(orders) * (len(MODES) + 1) * 2 * 2 * 2
        skipping = {c.attributes.rnn_mode for c in CASES if c.problem.network.skip_input}
        assert skipping == set(MODES)


class TestComparison:
    """A comparison that lets everything pass would make the tests above worthless."""

    CASE = next(case for case in CASES if case.name == "float32-time_major-gru-bidirectional-3_layers-lengths")

    def outputs(self) -> BackpropOutputs:
        trace = cudnn_rnn(np, self.CASE.inputs, self.CASE.problem)
        return cudnn_rnn_backprop(np, self.CASE.inputs, self.CASE.gradients, trace, self.CASE.problem)

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda a: a + 2e-5 * np.abs(a).max() * (a == a.max()), id="error"),
            pytest.param(lambda a: a.astype(np.float64), id="dtype"),
            pytest.param(lambda a: a[None], id="shape"),
            pytest.param(lambda a: np.where(a == a.max(), np.float32(np.nan), a), id="nan"),
            pytest.param(lambda a: np.where(a == a.max(), np.float32(np.inf), a), id="infinity"),
        ],
    )
    def test_anything_else_fails(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        good = self.outputs()
        with pytest.raises(AssertionError, match="params_backprop"):
            assert_outputs(self.CASE, replace(good, params_backprop=change(good.params_backprop)))

    def test_a_missing_output_fails(self) -> None:
        outputs = dict(vars(self.outputs()))
        del outputs["input_h_backprop"]
        with pytest.raises(AssertionError):
            assert_outputs(self.CASE, outputs)

    @pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
    def test_rounding_once_takes_half_of_what_is_allowed(self, dtype: str, bits: int) -> None:
        cases = [case for case in CASES if case.dtype == dtype]
        traces = [cudnn_rnn(np, case.inputs, case.problem) for case in cases]
        errors = [relative_error(case, "output", t.output) for case, t in zip(cases, traces, strict=True)]
        assert 2.0 ** -(bits + 2) < max(errors) <= 2.0**-bits * 1.01


@dataclass(frozen=True)
class Functional:
    """A random linear functional of the outputs of a network with random inputs, in float64."""

    inputs: ForwardInputs
    problem: Problem
    masks: tuple[NDArray[np.float64], ...]
    gradients: OutputGradients

    @classmethod
    def make(cls, *, sequence_lengths: NDArray[np.int32] | None = None, **keywords: Any) -> "Functional":
        """Takes attributes; with dropout there are masks."""
        attributes = ForwardAttributes(**keywords)
        random = np.random.default_rng(11)
        skips = attributes.input_mode == "skip_input"
        units, input_size = 3, 3 if skips else 2
        network = make_network(attributes, num_layers=LAYERS, input_size=input_size, num_units=units)
        problem = Problem(
            network, np.dtype(np.float64), STEPS, BATCH, attributes.time_major, attributes.dropout, 5, is_training=True
        )
        hidden, cell = problem.state_shape(network.hidden_size), problem.state_shape(units)
        is_lstm = attributes.rnn_mode == "lstm"
        inputs = ForwardInputs(
            input=random.standard_normal(problem.sequence_shape(input_size)),
            input_h=random.standard_normal(hidden),
            params=random.standard_normal(network.num_params) / 2,
            input_c=random.standard_normal(cell) if is_lstm else None,
            sequence_lengths=sequence_lengths,
        )
        assert plan_forward(inputs, replace(attributes, seed2=5)).problem == problem
        output = problem.sequence_shape(network.num_directions * network.hidden_size)
        gradients = OutputGradients(
            random.standard_normal(output),
            random.standard_normal(hidden),
            random.standard_normal(cell) if is_lstm else None,
        )
        return cls(inputs, problem, dropout_masks(problem), gradients)

    def trace(self, **changes: NDArray[Any]) -> Trace:
        return cudnn_rnn(np, replace(self.inputs, **changes), self.problem, self.masks)

    def value(self, **changes: NDArray[Any]) -> float:
        trace = self.trace(**changes)
        value = np.vdot(self.gradients.output_backprop, trace.output)
        value += np.vdot(self.gradients.output_h_backprop, trace.output_h)
        if self.gradients.output_c_backprop is not None:
            value += np.vdot(self.gradients.output_c_backprop, trace.output_c)
        return float(value)

    def backprop(self) -> BackpropOutputs:
        return cudnn_rnn_backprop(np, self.inputs, self.gradients, self.trace(), self.problem, self.masks)

    def difference(self, name: str, direction: NDArray[np.float64], step: float = 1e-6) -> float:
        at = getattr(self.inputs, name)
        change = self.value(**{name: at + step * direction}) - self.value(**{name: at - step * direction})
        return change / (2 * step)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_major": {"time_major": False},
    "skip_input": {"input_mode": "skip_input"},
    "dropout": {"dropout": 0.4},
    "lengths": {"sequence_lengths": LENGTHS},
    "all": {
        "time_major": False,
        "input_mode": "skip_input",
        "dropout": 0.4,
        "sequence_lengths": LENGTHS,
        "num_proj": 2,
    },
    "projection": {"num_proj": 2},
}


class TestGradientsBesideDifferences:
    @pytest.mark.sampled
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("rnn_mode", MODES)
    def test_every_input(self, rnn_mode: str, direction: str, variant: str) -> None:
        """Along random directions, and of input and states along every axis."""
        functional = Functional.make(rnn_mode=rnn_mode, direction=direction, **VARIANTS[variant])
        backprop = functional.backprop()
        random = np.random.default_rng(12)
        for name in ("input", "input_h", "params", "input_c") if rnn_mode == "lstm" else ("input", "input_h", "params"):
            gradient = getattr(backprop, f"{name}_backprop")
            directions = list(random.standard_normal((5, *gradient.shape)))
            if name != "params":
                directions += list(np.eye(gradient.size).reshape(-1, *gradient.shape))
            differences = [functional.difference(name, direction) for direction in directions]
            products = [np.vdot(gradient, direction) for direction in directions]
            np.testing.assert_allclose(products, differences, rtol=1e-6, atol=1e-7, err_msg=name)

    @pytest.mark.parametrize("rnn_mode", MODES)
    def test_every_parameter(self, rnn_mode: str) -> None:
        functional = Functional.make(rnn_mode=rnn_mode, direction="bidirectional", **VARIANTS["all"])
        gradient = functional.backprop().params_backprop
        differences = [functional.difference("params", axis) for axis in np.eye(gradient.size)]
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-7)

    def test_relu_has_no_slope_at_zero(self) -> None:
        inputs = ForwardInputs(np.zeros((2, 1, 1)), np.zeros((1, 1, 1)), np.ones(4) - [0, 0, 1, 1])
        problem = plan_forward(inputs, ForwardAttributes(rnn_mode="rnn_relu")).problem
        trace = cudnn_rnn(np, inputs, problem)
        gradients = OutputGradients(np.ones((2, 1, 1)), np.ones((1, 1, 1)))
        backprop = cudnn_rnn_backprop(np, inputs, gradients, trace, problem)
        assert not any(array.any() for array in vars(backprop).values())


class TestSequenceLengths:
    @pytest.mark.sampled
    @pytest.mark.parametrize("time_major", [True, False])
    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("rnn_mode", MODES)
    def test_each_sequence_is_as_if_alone(self, rnn_mode: str, direction: str, time_major: bool) -> None:
        """Cut to its length; what lies beyond is not read, and 0 in outputs."""
        keywords = {"rnn_mode": rnn_mode, "direction": direction, "time_major": time_major}
        functional = Functional.make(sequence_lengths=LENGTHS, **keywords)
        time, batch = (0, 1) if time_major else (1, 0)
        beyond = np.arange(STEPS)[:, None] >= LENGTHS
        beyond = (beyond if time_major else beyond.T)[..., None]
        inputs = replace(functional.inputs, input=np.where(beyond, np.nan, functional.inputs.input))
        gradients = replace(
            functional.gradients, output_backprop=np.where(beyond, np.nan, functional.gradients.output_backprop)
        )
        together = replace(functional, inputs=inputs, gradients=gradients)
        trace, backprop = together.trace(), together.backprop()
        params_backprop = np.zeros_like(backprop.params_backprop)
        for sequence, length in enumerate(LENGTHS):

            def cut(array: Given, *, is_state: bool) -> Given:
                if array is None or array.ndim == 0:
                    return array
                alone = array.take([sequence], axis=batch)  # noqa: B023
                return alone if is_state else alone.take(range(length), axis=time)  # noqa: B023

            problem = replace(functional.problem, batch=1, max_seq_length=int(length))
            mine = ForwardInputs(
                cut(inputs.input, is_state=False),
                cut(inputs.input_h, is_state=True),
                inputs.params,
                cut(inputs.input_c, is_state=True),
            )
            given = OutputGradients(
                cut(gradients.output_backprop, is_state=False),
                cut(gradients.output_h_backprop, is_state=True),
                cut(gradients.output_c_backprop, is_state=True),
            )
            alone = cudnn_rnn(np, mine, problem)
            back = cudnn_rnn_backprop(np, mine, given, alone, problem)
            params_backprop += back.params_backprop
            for many, one in (
                (trace.output_h, alone.output_h),
                (trace.output_c, alone.output_c),
                (backprop.input_h_backprop, back.input_h_backprop),
                (backprop.input_c_backprop, back.input_c_backprop),
            ):
                np.testing.assert_allclose(cut(many, is_state=True), one, rtol=1e-12)
            for many, one in ((trace.output, alone.output), (backprop.input_backprop, back.input_backprop)):
                np.testing.assert_allclose(cut(many, is_state=False), one, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(backprop.params_backprop, params_backprop, rtol=1e-12, atol=1e-14)
        for array in (trace.output, backprop.input_backprop):
            assert not array[np.broadcast_to(beyond, array.shape)].any()

    def test_full_lengths_are_as_none(self) -> None:
        without = Functional.make(direction="bidirectional")
        full = replace(without.inputs, sequence_lengths=np.full(BATCH, STEPS, np.int32))
        np.testing.assert_array_equal(cudnn_rnn(np, full, without.problem).output, without.trace().output)


class TestDropout:
    def masks(self, **changes: Any) -> tuple[NDArray[Any], ...]:
        functional = Functional.make(direction="bidirectional", dropout=0.4, num_proj=2)
        return dropout_masks(replace(functional.problem, **changes))

    def test_one_mask_for_each_pseudo_layer_but_the_first(self) -> None:
        network = replace(Functional.make(direction="bidirectional", num_proj=2).problem.network, num_layers=3)
        masks = self.masks(network=network)
        assert [mask.shape for mask in masks] == [(STEPS, BATCH, 4)] * 4
        assert len({mask.tobytes() for mask in masks}) == 4

    def test_values(self) -> None:
        masks = self.masks(max_seq_length=100, batch=50)
        assert {float(value) for value in np.unique(masks)} == {0.0, 1 / 0.6}
        assert np.mean(np.array(masks) == 0) == pytest.approx(0.4, abs=0.01)

    def test_the_same_at_every_call_and_in_every_order_and_dtype(self) -> None:
        masks = self.masks()
        for change in ({}, {"time_major": False}, {"dtype": np.dtype(np.float32)}, {"dtype": np.dtype(np.float16)}):
            other = self.masks(**change)
            assert all(np.array_equal(a == 0, b == 0) for a, b in zip(masks, other, strict=True))
            wide = change.get("dtype", masks[0].dtype) == np.float64
            assert {mask.dtype for mask in other} == {np.dtype(np.float64 if wide else np.float32)}

    def test_other_seeds_give_other_masks(self) -> None:
        seeds = [0, 1, 2**32, 2**64 - 1]
        assert len({self.masks(seed=seed)[0].tobytes() for seed in seeds}) == len(seeds)

    def test_the_generator_is_the_same_everywhere(self) -> None:
        """Numbers drawn once: servers of any version must agree with each other."""
        (mask, _) = self.masks(seed=(7 << 32) | 9, max_seq_length=2, batch=2)
        assert (mask != 0).astype(int).reshape(4, 4).tolist() == [
            [1, 1, 1, 1],
            [0, 1, 1, 1],
            [0, 0, 0, 1],
            [0, 0, 1, 0],
        ]

    def test_no_dropout(self) -> None:
        assert self.masks(dropout=0.0) == ()

    def test_masks_of_ones_change_nothing(self) -> None:
        functional = Functional.make(direction="bidirectional")
        ones = tuple(np.ones((STEPS, BATCH, 6)) for _ in range(2))
        np.testing.assert_array_equal(replace(functional, masks=ones).trace().output, functional.trace().output)

    def test_masks_are_of_the_input_of_upper_layers(self) -> None:
        """Each direction has its own: one that drops everything makes its direction deaf, and that alone."""
        functional = Functional.make(rnn_mode="rnn_tanh", direction="bidirectional")
        ones, zeros = np.ones((STEPS, BATCH, 6)), np.zeros((STEPS, BATCH, 6))
        deaf = replace(functional, masks=(ones, zeros))
        loud = replace(functional.inputs, input=functional.inputs.input + 1)
        before, after = deaf.trace().output, replace(deaf, inputs=loud).trace().output
        np.testing.assert_array_equal(after[..., 3:], before[..., 3:])
        assert (after[..., :3] != before[..., :3]).all()
        np.testing.assert_array_equal(before[..., :3], functional.trace().output[..., :3])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_rounded_at_the_end_alone(dtype: type) -> None:
    case = next(c for c in CASES if c.dtype == np.dtype(dtype).name and "lstm-bidirectional-3_layers-full" in c.name)
    wide = ForwardInputs(**{name: a if a is None else a.astype(np.float32) for name, a in vars(case.inputs).items()})
    narrow = cudnn_rnn(np, case.inputs, case.problem)
    expected = cudnn_rnn(np, wide, replace(case.problem, dtype=np.dtype(np.float32)))
    for name, output in forward_outputs(narrow).items():
        np.testing.assert_array_equal(output, getattr(expected, name).astype(dtype))


@pytest.mark.parametrize("rnn_mode", MODES)
def test_large_inputs_saturate_without_warnings(rnn_mode: str) -> None:
    functional = Functional.make(rnn_mode=rnn_mode)
    for sign in (-1e4, 1e4):
        assert np.isfinite(functional.trace(input=np.full_like(functional.inputs.input, sign)).output).all()
