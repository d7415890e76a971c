"""The parameters of CudnnRNN: where each lies in the vector, and the ops that tell and convert it."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.canonical import (
    CUDNN_RNN_CANONICAL_TO_PARAMS,
    CUDNN_RNN_PARAMS_SIZE,
    CUDNN_RNN_PARAMS_TO_CANONICAL,
    CanonicalParams,
    CudnnRnnParams,
    ParamsSizeAttributes,
    ParamsSizeInputs,
    ParamsToCanonicalAttributes,
    ParamsToCanonicalInputs,
    network_of,
)
from gradserve_server.ops.cudnn_rnn.spec import Mode, Network, NetworkAttributes, split_params
from gradserve_server.ops.operation import Op

FAMILY = CudnnRnnParams(CpuDevice(BufferPool(0)))


def call(op: Op[Any, Any, Any, Any], inputs: Any, attributes: Any) -> Any:
    """Runs an op, and checks that its outputs are those it planned."""
    plan = op.plan(inputs, attributes)
    outputs = op.compute(FAMILY, inputs, attributes, plan)
    arrays = [a for value in vars(outputs).values() for a in (value if isinstance(value, tuple) else (value,))]
    assert [(a.dtype, a.shape) for a in arrays] == [(spec.dtype, spec.shape) for spec in plan.output_specs]
    assert all(array.flags.c_contiguous for array in arrays)
    return outputs


def params_size(**keywords: Any) -> int:
    (size,) = call(CUDNN_RNN_PARAMS_SIZE, ParamsSizeInputs(), ParamsSizeAttributes(**keywords)).params_size
    return int(size)


def to_canonical(params: NDArray[Any], **keywords: Any) -> CanonicalParams:
    attributes = ParamsToCanonicalAttributes(**keywords)
    canonical: CanonicalParams = call(CUDNN_RNN_PARAMS_TO_CANONICAL, ParamsToCanonicalInputs(params), attributes)
    return canonical


def to_params(canonical: CanonicalParams, **keywords: Any) -> NDArray[Any]:
    params: NDArray[Any] = call(CUDNN_RNN_CANONICAL_TO_PARAMS, canonical, NetworkAttributes(**keywords)).params
    return params


class TestLayout:
    def test_tanh_of_two_layers_and_directions(self) -> None:
        network = Network(Mode.TANH, num_layers=2, num_directions=2, input_size=2, num_units=3)
        params = np.arange(108)
        assert network.num_params == 108
        pseudo_layers = split_params(network, params)
        # By pseudo-layer: W, R; then bW, bR. The upper layer reads both directions of the lower one.
        assert [p.input_weights.ravel()[0] for p in pseudo_layers] == [0, 15, 30, 57]
        assert [p.recurrent_weights.ravel()[0] for p in pseudo_layers] == [6, 21, 48, 75]
        assert [p.input_bias[0] for p in pseudo_layers] == [84, 90, 96, 102]
        assert [p.recurrent_bias[0] for p in pseudo_layers] == [87, 93, 99, 105]
        assert pseudo_layers[2].input_weights.tolist() == [
            [30, 31, 32, 33, 34, 35],
            [36, 37, 38, 39, 40, 41],
            [42, 43, 44, 45, 46, 47],
        ]
        assert {p.projection is None for p in pseudo_layers} == {True}

    def test_lstm_with_projection(self) -> None:
        keywords = {"num_layers": 1, "num_units": 3, "input_size": 4, "num_proj": 2}
        canonical = to_canonical(np.arange(102.0), **keywords, num_params_weights=9, num_params_biases=8)
        # W of i, f, c, o, each [3, 4]; R, each [3, 2]; P, [2, 3].
        assert [(w.shape, w[0, 0]) for w in canonical.weights] == [
            *(((3, 4), start) for start in (0, 12, 24, 36)),
            *(((3, 2), start) for start in (48, 54, 60, 66)),
            ((2, 3), 72),
        ]
        assert [b.tolist() for b in canonical.biases] == [
            [78, 79, 80],
            [81, 82, 83],
            [84, 85, 86],
            [87, 88, 89],
            [90, 91, 92],
            [93, 94, 95],
            [96, 97, 98],
            [99, 100, 101],
        ]

    def test_skip_input_leaves_the_first_matrices_out(self) -> None:
        keywords = {"num_layers": 2, "num_units": 2, "input_size": 2, "rnn_mode": "gru", "input_mode": "skip_input"}
        count = 3 * 4 + 2 * 3 * 4 + 2 * 2 * 3 * 2
        assert params_size(**keywords) == count
        canonical = to_canonical(
            np.arange(count, dtype=np.float32), **keywords, num_params_weights=12, num_params_biases=12
        )
        assert [w.shape for w in canonical.weights] == [(2, 0)] * 3 + [(2, 2)] * 9
        assert [w[0, 0] for w in canonical.weights[3:]] == list(range(0, 36, 4))
        np.testing.assert_array_equal(to_params(canonical, **keywords), np.arange(count))


@st.composite
def networks(draw: st.DrawFn) -> dict[str, Any]:
    units = draw(st.integers(1, 5))
    input_mode = draw(st.sampled_from(["linear_input", "skip_input", "auto_select"]))
    return {
        "num_layers": draw(st.integers(1, 4)),
        "num_units": units,
        "input_size": units if input_mode == "skip_input" else draw(st.integers(1, 5)),
        "rnn_mode": draw(st.sampled_from([mode.value for mode in Mode])),
        "input_mode": input_mode,
        "direction": draw(st.sampled_from(["unidirectional", "bidirectional"])),
        "num_proj": draw(st.integers(0, units)),
    }


def counts(network: Network) -> dict[str, int]:
    biases = 2 * network.mode.num_gates * network.num_pseudo_layers
    return {
        "num_params_weights": biases + network.num_pseudo_layers * bool(network.num_proj),
        "num_params_biases": biases,
    }


class TestAnyNetwork:
    @settings(deadline=None)
    @given(networks())
    def test_size_is_what_is_used(self, keywords: dict[str, Any]) -> None:
        """Every parameter is in one view, and each of the vector's elements is one."""
        size = params_size(**keywords)
        seen = np.zeros(size, np.int64)
        for pseudo_layer in split_params(network_of(NetworkAttributes(**keywords)), seen):
            for view in vars(pseudo_layer).values():
                if view is not None:
                    view += 1
        assert size > 0
        np.testing.assert_array_equal(seen, 1)

    @settings(deadline=None)
    @given(networks(), st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]))
    def test_there_and_back(self, keywords: dict[str, Any], dtype: type) -> None:
        network = network_of(NetworkAttributes(**keywords))
        bits = np.random.default_rng(3).integers(0, 256, params_size(**keywords) * np.dtype(dtype).itemsize, np.uint8)
        params: NDArray[Any] = bits.view(dtype)
        canonical = to_canonical(params, **keywords, **counts(network))
        assert to_params(canonical, **keywords).tobytes() == params.tobytes()
        assert not any(np.shares_memory(a, params) for a in (*canonical.weights, *canonical.biases))

    @settings(deadline=None)
    @given(networks(), st.sampled_from([lambda a: a.ravel(), lambda a: a.reshape(1, -1, 1), lambda a: a.ravel()[None]]))
    def test_any_shape_of_as_many_elements(
        self, keywords: dict[str, Any], reshaped: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> None:
        """As TensorFlow's own converter passes them."""
        network = network_of(NetworkAttributes(**keywords))
        params = np.arange(network.num_params, dtype=np.float32)
        canonical = to_canonical(params, **keywords, **counts(network))
        weights, biases = (tuple(map(reshaped, arrays)) for arrays in (canonical.weights, canonical.biases))
        np.testing.assert_array_equal(to_params(CanonicalParams(weights, biases), **keywords), params)

    @settings(deadline=None)
    @given(networks())
    def test_canonical_lists(self, keywords: dict[str, Any]) -> None:
        """By gate what `split_params` gives for all gates."""
        network = network_of(NetworkAttributes(**keywords))
        params = np.arange(network.num_params, dtype=np.float64)
        canonical = to_canonical(params, **keywords, **counts(network))
        gates = network.mode.num_gates
        weights, biases = list(canonical.weights), list(canonical.biases)
        for pseudo_layer in split_params(network, params):
            for expected in (pseudo_layer.input_weights, pseudo_layer.recurrent_weights):
                np.testing.assert_array_equal(np.concatenate([weights.pop(0) for _ in range(gates)]), expected)
            if pseudo_layer.projection is not None:
                np.testing.assert_array_equal(weights.pop(0), pseudo_layer.projection)
            for expected in (pseudo_layer.input_bias, pseudo_layer.recurrent_bias):
                np.testing.assert_array_equal(np.concatenate([biases.pop(0) for _ in range(gates)]), expected)
        assert (weights, biases) == ([], [])


class TestParamsSize:
    @pytest.mark.parametrize(
        ("keywords", "size"),
        [
            ({}, 4 * 6 * (4 + 6) + 48),
            ({"rnn_mode": "gru"}, 3 * 6 * (4 + 6) + 36),
            ({"rnn_mode": "rnn_relu", "direction": "bidirectional"}, 2 * (6 * (4 + 6) + 12)),
            ({"num_proj": 3}, 4 * 6 * (4 + 3) + 3 * 6 + 48),
            ({"num_proj": 6}, 4 * 6 * (4 + 6) + 48),
            ({"num_proj": 3, "rnn_mode": "gru"}, 3 * 6 * (4 + 6) + 36),
            ({"input_mode": "skip_input", "input_size": 6}, 4 * 6 * 6 + 48),
            ({"input_mode": "auto_select", "input_size": 6}, 4 * 6 * 6 + 48),
            ({"input_mode": "auto_select"}, 4 * 6 * (4 + 6) + 48),
            ({"num_layers": 3}, 4 * 6 * (4 + 6) + 2 * 4 * 6 * (6 + 6) + 3 * 48),
        ],
    )
    def test_size(self, keywords: dict[str, Any], size: int) -> None:
        assert params_size(**{"num_layers": 1, "num_units": 6, "input_size": 4} | keywords) == size

    def test_very_many_layers(self) -> None:
        """Neither takes time in proportion to the layers, nor overflows."""
        keywords = {"num_layers": 2**31 - 1, "num_units": 1, "input_size": 1, "rnn_mode": "rnn_tanh"}
        assert params_size(**keywords, s="int64") == 4 * (2**31 - 1)
        with pytest.raises(InvalidArgumentError, match="int32 cannot hold the params size, 8589934588") as raised:
            params_size(**keywords)
        assert raised.value.field == "s"


NET = {"num_layers": 1, "num_units": 6, "input_size": 4}
V1 = {"num_params_weights": 8, "num_params_biases": 8}
BIDIRECTIONAL = {"direction": "bidirectional"}
NOT_IN_LIST = "is not in the list of allowed values:"
MODES = '"rnn_relu", "rnn_tanh", "lstm", "gru"'
DIRECTIONS = '"unidirectional", "bidirectional"'
NO_MULTIPLE = "is not a multipleof num_layers * num_dirs."
TOO_FEW = "must be at least minimum 1"
NO_PARITY = "Number of params (weights) per layer is notan"
ABOUT = "unidirectional lstm with num_layers 1, input_size 4, num_units 6"

NO_NETWORK = [
    ("num_layers", "num_layers must be at least 1, got 0", {"num_layers": 0}),
    ("num_units", "num_units must be at least 1, got -6", {"num_units": -6}),
    ("input_size", "input_size must be at least 1, got 0", {"input_size": 0}),
    ("input_size", f"Attr input_size has value {2**31} out of range for an int32", {"input_size": 2**31}),
    ("rnn_mode", f"Value for attr 'rnn_mode' of \"x\" {NOT_IN_LIST} {MODES}", {"rnn_mode": "x"}),
    ("direction", f"Value for attr 'direction' of \"\" {NOT_IN_LIST} {DIRECTIONS}", {"direction": ""}),
    ("input_mode", "skip_input needs an input_size equal to num_units, got 4 and 6", {"input_mode": "skip_input"}),
    ("num_proj", "num_proj must be from 0 to num_units, 6, got 7", {"num_proj": 7}),
    ("num_proj", "num_proj must be from 0 to num_units, 6, got -1", {"num_proj": -1}),
]
NO_CANONICAL = [
    ("num_params_weights", f"Value for attr 'num_params_weights' of 0 {TOO_FEW}", {"num_params_weights": 0}),
    ("num_params_biases", f"Value for attr 'num_params_biases' of -1 {TOO_FEW}", {"num_params_biases": -1}),
    ("num_params_weights", f"Number of params (weights) {NO_MULTIPLE}", BIDIRECTIONAL | {"num_params_weights": 15}),
    ("num_params_biases", f"Number of params (biases) {NO_MULTIPLE}", BIDIRECTIONAL | {"num_params_biases": 15}),
    ("num_params_weights", f"{NO_PARITY} even number with no projection.", {"num_params_weights": 9}),
    ("num_params_weights", f"{NO_PARITY} odl number with projection.", {"num_proj": 3}),
    ("num_params_weights", "C Number of params mismatch. Expected 6, got 8", {"num_params_weights": 6}),
    ("num_params_weights", "C Number of params mismatch. Expected 7, got 9", {"num_params_weights": 7, "num_proj": 3}),
    ("num_params_biases", "A Number of params mismatch. Expected 6, got 8", {"num_params_biases": 6}),
]


def weights(**changes: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Those of NET, all zeros; `w3` is the fourth one."""
    shapes = [(6, 4)] * 4 + [(6, 6)] * 4
    return tuple(changes.get(f"w{i}", np.zeros(shape, np.float32)) for i, shape in enumerate(shapes))


def biases(**changes: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    return tuple(changes.get(f"b{i}", np.zeros(6, np.float32)) for i in range(8))


NO_PARAMS = [
    ("weights", f"weights must be a list of 8 for {ABOUT}, got 7", weights()[:7], biases()),
    ("weights", f"weights must be a list of 8 for {ABOUT}, got 0", (), ()),
    ("biases", f"biases must be a list of 8 for {ABOUT}, got 9", weights(), (*biases(), np.zeros(6, np.float32))),
    (
        "weights[3]",
        "weights[3] must have 24 elements, as many as shape [6,4], got shape [6,6]",
        weights(w3=np.zeros((6, 6), np.float32)),
        biases(),
    ),
    (
        "weights[7]",
        "weights[7] must have 36 elements, as many as shape [6,6], got shape [35]",
        weights(w7=np.zeros(35, np.float32)),
        biases(),
    ),
    (
        "biases[1]",
        "biases[1] must have 6 elements, as many as shape [6], got shape []",
        weights(),
        biases(b1=np.zeros((), np.float32)),
    ),
    (
        "weights[0]",
        f"Value for attr 'T' of int32 {NOT_IN_LIST} bfloat16, half, float, double",
        weights(w0=np.zeros((6, 4), np.int32)),
        biases(),
    ),
    (
        "biases[7]",
        "biases[7] must have the dtype of weights[0], float, got double",
        weights(),
        biases(b7=np.zeros(6)),
    ),
]


class TestRefused:
    @pytest.mark.parametrize(("field", "message", "changes"), NO_NETWORK)
    def test_no_such_network(self, field: str, message: str, changes: dict[str, Any]) -> None:
        for attempt in (
            lambda: params_size(**NET | changes),
            lambda: to_canonical(np.zeros(288), **NET | V1 | changes),
            lambda: to_params(CanonicalParams(weights(), biases()), **NET | changes),
        ):
            self._assert_refused(attempt, field, message)

    def test_size_type(self) -> None:
        message = f"Value for attr 'S' of int16 {NOT_IN_LIST} int32, int64"
        self._assert_refused(lambda: params_size(**NET, s="int16"), "s", message)

    @pytest.mark.parametrize(("field", "message", "changes"), NO_CANONICAL)
    def test_to_canonical(self, field: str, message: str, changes: dict[str, Any]) -> None:
        both = {"num_params_weights": 16, "num_params_biases": 16} if "direction" in changes else V1
        self._assert_refused(lambda: to_canonical(np.zeros(288), **NET | both | changes), field, message)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (np.zeros(288, np.int64), f"Value for attr 'T' of int64 {NOT_IN_LIST} bfloat16, half, float, double"),
            (np.zeros(289), f"Params size mismatch. Expected 288, got 289, for {ABOUT}"),
            (np.zeros((1, 288)), f"params must have shape [288] for {ABOUT}, got [1,288]"),
        ],
    )
    def test_params(self, params: NDArray[Any], message: str) -> None:
        self._assert_refused(lambda: to_canonical(params, **NET, **V1), "params", message)

    @pytest.mark.parametrize(("field", "message", "weights", "biases"), NO_PARAMS)
    def test_to_params(
        self, field: str, message: str, weights: tuple[NDArray[Any], ...], biases: tuple[NDArray[Any], ...]
    ) -> None:
        self._assert_refused(lambda: to_params(CanonicalParams(weights, biases), **NET), field, message)

    def _assert_refused(self, attempt: Any, field: str, message: str) -> None:
        with pytest.raises(InvalidArgumentError) as raised:
            attempt()
        assert (raised.value.field, raised.value.message) == (field, message)
