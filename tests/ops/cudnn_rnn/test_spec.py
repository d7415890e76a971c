"""What CudnnRNN and CudnnRNNBackprop refuse, in TensorFlow's words and order, and what they take."""

from dataclasses import fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.declaration import plan_backprop, plan_forward
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropInputs,
    ForwardAttributes,
    ForwardInputs,
    Mode,
    Network,
    Plan,
    Problem,
    RnnAttributes,
)

DOUBLE, HALF, INT = np.float64, np.float16, np.int64


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


LENGTHS = np.array([3, 5, 1], np.int32)
NUM_PARAMS = 4 * 6 * (4 + 6) + 8 * 6
FORWARD = ForwardInputs(zeros(5, 3, 4), zeros(1, 3, 6), zeros(NUM_PARAMS), zeros(1, 3, 6), LENGTHS)
"""An lstm: T = 5, B = 3, I = 4, H = 6."""


def backprop_of(forward: ForwardInputs, **reserved: NDArray[Any]) -> BackpropInputs:
    """Returns the inputs that go with those of a forward call, of one direction or with outputs of that size."""
    output = zeros(*forward.input.shape[:2], forward.input_h.shape[-1], dtype=forward.input.dtype)
    return BackpropInputs(
        **vars(forward),
        output=output,
        output_h=forward.input_h,
        output_c=forward.input_c,
        output_backprop=output,
        output_h_backprop=forward.input_h,
        output_c_backprop=forward.input_c,
        reserve_space=zeros(100, dtype=forward.input.dtype),
        **reserved,
    )


BACKPROP = backprop_of(FORWARD, host_reserved=zeros(128, dtype=np.int8))


def plan(inputs: ForwardInputs | BackpropInputs, attributes: Any) -> Plan:
    return plan_forward(inputs, attributes) if isinstance(inputs, ForwardInputs) else plan_backprop(inputs, attributes)


def changed(inputs: Any, changes: dict[str, Any]) -> tuple[Any, RnnAttributes]:
    """Makes a call from one with default attributes."""
    names = {field.name for field in fields(inputs)}
    mine = {name: value for name, value in changes.items() if name in names}
    rest = {name: value for name, value in changes.items() if name not in names}
    attributes = ForwardAttributes(**rest) if isinstance(inputs, ForwardInputs) else RnnAttributes(**rest)
    return replace(inputs, **mine), attributes


def refusal(inputs: Any, field: str, message: str, **changes: Any) -> Any:
    called = ", ".join(f"{n}={getattr(v, 'shape', v)} {getattr(v, 'dtype', '')}".strip() for n, v in changes.items())
    return pytest.param(*changed(inputs, changes), field, message, id=f"{field}: {called}")


def assert_refused(inputs: Any, attributes: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        plan(inputs, attributes)
    assert (raised.value.field, raised.value.message) == (field, message)


NOT_IN_LIST = "is not in the list of allowed values:"
MODES = '"rnn_relu", "rnn_tanh", "lstm", "gru"'
INPUT_MODES = '"linear_input", "skip_input", "auto_select"'
TYPES = "bfloat16, half, float, double"
SAME_SHAPE = "input_h and input_c must have the same shape w/o projection:"
PROJECTED = "Invalid input_h and input_c w/ projection size:"
NETWORK = "unidirectional lstm with num_layers 1, input_size 4, num_units 6"

TENSORFLOWS: list[tuple[str, str, dict[str, Any]]] = [
    ("rnn_mode", f"Value for attr 'rnn_mode' of \"foo\" {NOT_IN_LIST} {MODES}", {"rnn_mode": "foo"}),
    ("rnn_mode", f"Value for attr 'rnn_mode' of \"\" {NOT_IN_LIST} {MODES}", {"rnn_mode": ""}),
    ("input_mode", f"Value for attr 'input_mode' of \"skip\" {NOT_IN_LIST} {INPUT_MODES}", {"input_mode": "skip"}),
    (
        "direction",
        f'Value for attr \'direction\' of "both" {NOT_IN_LIST} "unidirectional", "bidirectional"',
        {"direction": "both"},
    ),
    ("num_proj", f"Attr num_proj has value {2**31} out of range for an int32", {"num_proj": 2**31}),
    ("seed", f"Attr seed has value {-(2**31) - 1} out of range for an int32", {"seed": -(2**31) - 1}),
    ("seed2", f"Attr seed2 has value {2**40} out of range for an int32", {"seed2": 2**40}),
    ("input", f"Value for attr 'T' of int64 {NOT_IN_LIST} {TYPES}", {"input": zeros(5, 3, 4, dtype=INT)}),
    ("input", "RNN input must be a 3-D vector.", {"input": zeros(5, 12)}),
    ("input", "RNN input must be a 3-D vector.", {"input": zeros(), "input_h": zeros()}),
    ("input_h", "RNN input_h must be a 3-D vector.", {"input_h": zeros(3, 6)}),
    ("input_h", "RNN input_h must be a 3-D vector.", {"input_h": zeros(1, 1, 3, 6), "input_c": zeros(2)}),
    ("input_h", "Invalid input_h shape: [1,2,6] [1,3,6]", {"input_h": zeros(1, 2, 6)}),
    ("input_h", "Invalid input_h shape: [3,3,6] [2,3,6]", {"input_h": zeros(3, 3, 6), "direction": "bidirectional"}),
    ("input_h", "Invalid input_h shape: [1,3,6] [0,3,6]", {"direction": "bidirectional"}),
    ("input_h", "Invalid input_h shape: [1,3,6] [5,3,6]", {"time_major": False}),
    (
        "input_h",
        "Invalid input_h shape: [5,3,6] [5,2,6]",
        {"time_major": False, "input_h": zeros(5, 3, 6), "direction": "bidirectional"},
    ),
    ("input_c", f"{SAME_SHAPE} [1,3,6] [1,3,5]", {"input_c": zeros(1, 3, 5)}),
    ("input_c", f"{SAME_SHAPE} [1,3,6] [2,3,6]", {"input_c": zeros(2, 3, 6)}),
    ("input_c", f"{SAME_SHAPE} [1,3,6] [6]", {"input_c": zeros(6)}),
    ("input_c", f"{PROJECTED} 2 [1,3,6] [1,3,6]", {"num_proj": 2}),
    ("input_c", f"{PROJECTED} -1 [1,3,6] [1,3,6]", {"num_proj": -1}),
    ("input_c", f"{PROJECTED} 7 [1,3,7] [1,3,6]", {"num_proj": 7, "input_h": zeros(1, 3, 7)}),
    (
        "input_c",
        f"{PROJECTED} 2 [1,3,2] [2,3,6]",
        {"num_proj": 2, "input_h": zeros(1, 3, 2), "input_c": zeros(2, 3, 6)},
    ),
    (
        "input_c",
        f"{PROJECTED} 2 [1,3,2] [1,4,6]",
        {"num_proj": 2, "input_h": zeros(1, 3, 2), "input_c": zeros(1, 4, 6)},
    ),
    ("input_c", f"{PROJECTED} 2 [1,3,2] []", {"num_proj": 2, "input_h": zeros(1, 3, 2), "input_c": zeros()}),
]
OURS: list[tuple[str, str, dict[str, Any]]] = [
    ("input_h", "input_h must have the dtype of input, float, got double", {"input_h": zeros(1, 3, 6, dtype=DOUBLE)}),
    ("input_c", "input_c must have the dtype of input, float, got half", {"input_c": zeros(1, 3, 6, dtype=HALF)}),
    ("params", "params must have the dtype of input, float, got int64", {"params": zeros(NUM_PARAMS, dtype=INT)}),
    ("input_h", "input_h must have the dtype of input, double, got float", {"input": zeros(5, 3, 4, dtype=DOUBLE)}),
    ("input_c", "input_c is missing; rnn_mode lstm needs it", {"input_c": None}),
    (
        "input_mode",
        "skip_input needs an input_size equal to num_units, got 4 and 6",
        {"input_mode": "skip_input"},
    ),
    ("params", f"params must have shape [288] for {NETWORK}, got [287]", {"params": zeros(287)}),
    ("params", f"params must have shape [288] for {NETWORK}, got [288,1]", {"params": zeros(288, 1)}),
    ("params", f"params must have shape [288] for {NETWORK}, got []", {"params": zeros()}),
    (
        "sequence_lengths",
        "sequence_lengths must be int32 of shape [3], one for each sequence of the batch, got int64 [3]",
        {"sequence_lengths": zeros(3, dtype=INT)},
    ),
    (
        "sequence_lengths",
        "sequence_lengths must be int32 of shape [3], one for each sequence of the batch, got int32 [4]",
        {"sequence_lengths": zeros(4, dtype=np.int32)},
    ),
    (
        "sequence_lengths",
        "sequence_lengths must be int32 of shape [3], one for each sequence of the batch, got int32 []",
        {"sequence_lengths": zeros(dtype=np.int32)},
    ),
    *(
        ("dropout", f"dropout must be in [0, 1), got {dropout}", {"dropout": dropout})
        for dropout in (1.0, -0.1, float("nan"), float("inf"))
    ),
]
BACKPROPS: list[tuple[str, str, dict[str, Any]]] = [
    ("output", "Invalid output shape: [5,3,4] [5,3,6]", {"output": zeros(5, 3, 4)}),
    ("output_h", "Invalid output_h shape: [3,6] [1,3,6]", {"output_h": zeros(3, 6)}),
    ("output_backprop", "Invalid output_backprop shape: [3,5,6] [5,3,6]", {"output_backprop": zeros(3, 5, 6)}),
    ("output_h_backprop", "Invalid output_h_backprop shape: [] [1,3,6]", {"output_h_backprop": zeros()}),
    ("output_c", "Invalid output_c shape: [2,3,6] [1,3,6]", {"output_c": zeros(2, 3, 6)}),
    ("output_c_backprop", "Invalid output_c_backprop shape: [1,3,5] [1,3,6]", {"output_c_backprop": zeros(1, 3, 5)}),
    ("output_c", "output_c is missing; rnn_mode lstm needs it", {"output_c": None}),
    ("output_c_backprop", "output_c_backprop is missing; rnn_mode lstm needs it", {"output_c_backprop": None}),
    *(
        (name, f"{name} must have the dtype of input, float, got half", {name: zeros(5, 3, 6, dtype=HALF)})
        for name in ("output", "output_h", "output_backprop", "output_h_backprop", "output_c", "output_c_backprop")
    ),
    (
        "reserve_space",
        "reserve_space must have the dtype of input, float, got half",
        {"reserve_space": zeros(9, dtype=HALF)},
    ),
    (
        "reserve_space",
        "reserve_space must be 1-dimensional, as CudnnRNN gives it when is_training, got shape []",
        {"reserve_space": zeros()},
    ),
    (
        "host_reserved",
        "host_reserved must be 1-dimensional int8, as CudnnRNN gives it when is_training, got int8 []",
        {"host_reserved": zeros(dtype=np.int8)},
    ),
    (
        "host_reserved",
        "host_reserved must be 1-dimensional int8, as CudnnRNN gives it when is_training, got float [128]",
        {"host_reserved": zeros(128)},
    ),
]
EMPTY = [
    ("input", "max_seq_length, batch_size and input_size must be at least 1, got input [0,3,4]", (0, 3, 4), (1, 3, 6)),
    ("input", "max_seq_length, batch_size and input_size must be at least 1, got input [5,0,4]", (5, 0, 4), (1, 0, 6)),
    ("input", "max_seq_length, batch_size and input_size must be at least 1, got input [5,3,0]", (5, 3, 0), (1, 3, 6)),
    ("input_h", "num_layers and num_units must be at least 1, got input_h [0,3,6]", (5, 3, 4), (0, 3, 6)),
    ("input_h", "num_layers and num_units must be at least 1, got input_h [1,3,0]", (5, 3, 4), (1, 3, 0)),
]


class TestRefused:
    @pytest.mark.parametrize(
        ("inputs", "attributes", "field", "message"),
        [
            refusal(inputs, field, message, **changes)
            for inputs in (FORWARD, BACKPROP)
            for field, message, changes in (*TENSORFLOWS, *OURS)
        ],
    )
    def test_by_both_ops(self, inputs: Any, attributes: Any, field: str, message: str) -> None:
        assert_refused(inputs, attributes, field, message)

    @pytest.mark.parametrize(
        ("inputs", "attributes", "field", "message"),
        [refusal(BACKPROP, field, message, **changes) for field, message, changes in BACKPROPS],
    )
    def test_by_backprop(self, inputs: Any, attributes: Any, field: str, message: str) -> None:
        assert_refused(inputs, attributes, field, message)

    @pytest.mark.parametrize(("field", "message", "sequence", "state"), EMPTY)
    def test_empty(self, field: str, message: str, sequence: tuple[int, ...], state: tuple[int, ...]) -> None:
        forward = ForwardInputs(zeros(*sequence), zeros(*state), zeros(1), zeros(*state))
        assert_refused(forward, ForwardAttributes(), field, message)
        assert_refused(backprop_of(forward), RnnAttributes(), field, message)

    @pytest.mark.parametrize(
        ("changes", "fields"),
        [
            pytest.param({"rnn_mode": "foo", "input": zeros(dtype=INT)}, ["rnn_mode", "input"], id="attributes first"),
            pytest.param(
                {"input": zeros(5), "input_h": zeros(1, dtype=HALF), "input_c": zeros(2)},
                ["input_h", "input", "input_c"],
                id="dtypes before shapes",
            ),
            pytest.param(
                {"input_h": zeros(1, 2, 6), "input_c": zeros(1, 3, 5), "input_mode": "skip_input", "dropout": 2.0},
                ["input_h", "input_c", "input_mode", "dropout"],
                id="forward",
            ),
            pytest.param(
                {
                    "output": zeros(1),
                    "output_h": zeros(1),
                    "output_backprop": zeros(1),
                    "output_h_backprop": zeros(1),
                    "output_c": zeros(1),
                    "output_c_backprop": zeros(1),
                    "dropout": 1.0,
                    "params": zeros(3),
                    "sequence_lengths": zeros(1),
                    "reserve_space": zeros(),
                    "host_reserved": zeros(),
                },
                [
                    *("output", "output_h", "output_backprop", "output_h_backprop", "output_c", "output_c_backprop"),
                    *("dropout", "params", "sequence_lengths", "reserve_space", "host_reserved"),
                ],
                id="backprop",
            ),
        ],
    )
    def test_order(self, changes: dict[str, Any], fields: list[str]) -> None:
        """Of several faults the first is told; without it, the next."""
        inputs, attributes = changed(BACKPROP, changes)
        for field in fields:
            with pytest.raises(InvalidArgumentError) as raised:
                plan(inputs, attributes)
            assert raised.value.field == field
            if field in changes and hasattr(BACKPROP, field):
                inputs = replace(inputs, **{field: getattr(BACKPROP, field)})
            else:
                attributes = replace(attributes, **{field: getattr(RnnAttributes(), field)})


class TestTaken:
    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
    def test_dtypes(self, dtype: type) -> None:
        arrays = {name: a.astype(dtype) for name, a in vars(FORWARD).items() if name != "sequence_lengths"}
        problem = plan_forward(ForwardInputs(**arrays), ForwardAttributes()).problem
        assert problem.dtype == dtype
        assert problem.compute_dtype == (np.float64 if dtype is np.float64 else np.float32)

    @pytest.mark.parametrize("num_proj", [0, 3, -1])
    @pytest.mark.parametrize("input_c", [None, zeros(7, dtype=HALF)], ids=["missing", "anything"])
    @pytest.mark.parametrize("rnn_mode", ["rnn_relu", "rnn_tanh", "gru"])
    def test_cells_and_projection_are_for_lstm(self, rnn_mode: str, input_c: Any, num_proj: int) -> None:
        network = Network(Mode(rnn_mode), 1, 1, input_size=4, num_units=6)
        forward = replace(FORWARD, input_c=input_c, params=zeros(network.num_params))
        keywords: dict[str, Any] = {"rnn_mode": rnn_mode, "num_proj": num_proj}
        assert plan_forward(forward, ForwardAttributes(**keywords)).problem.network == network
        assert plan_backprop(backprop_of(forward), RnnAttributes(**keywords)).problem.network == network

    @pytest.mark.parametrize(
        ("num_proj", "expected", "num_params"), [(0, 0, 288), (6, 0, 288), (2, 2, 4 * 6 * (4 + 2) + 2 * 6 + 48)]
    )
    def test_projection(self, num_proj: int, expected: int, num_params: int) -> None:
        inputs = replace(FORWARD, input_h=zeros(1, 3, num_proj or 6), params=zeros(num_params))
        network = plan_forward(inputs, ForwardAttributes(num_proj=num_proj)).problem.network
        assert network == Network(Mode.LSTM, 1, 1, 4, 6, num_proj=expected)

    @pytest.mark.parametrize(
        ("input_mode", "input_size", "skips"),
        [
            ("linear_input", 6, False),
            ("skip_input", 6, True),
            ("auto_select", 6, True),
            ("auto_select", 4, False),
        ],
    )
    def test_input_modes(self, input_mode: str, input_size: int, skips: bool) -> None:
        inputs = replace(FORWARD, input=zeros(5, 3, input_size))
        count = 4 * 6 * ((0 if skips else input_size) + 6) + 48
        network = plan_forward(replace(inputs, params=zeros(count)), ForwardAttributes(input_mode=input_mode)).problem
        assert network.network.skip_input is skips

    @pytest.mark.parametrize("dropout", [1.0, -3.0, float("nan")])
    def test_no_dropout_without_training(self, dropout: float) -> None:
        assert plan_forward(FORWARD, ForwardAttributes(dropout=dropout, is_training=False)).problem.dropout == 0

    def test_no_dropout_of_one_layer(self) -> None:
        assert plan_forward(FORWARD, ForwardAttributes(dropout=0.5)).problem.dropout == 0

    @pytest.mark.parametrize(
        ("seed", "seed2", "combined"),
        [
            (0, 0, 0),
            (1, 2, (1 << 32) + 2),
            (2**31 - 1, 2**31 - 1, 0x7FFFFFFF_7FFFFFFF),
            (-1, 5, 0xFFFFFFFF_00000005),
            (-(2**31), 0, 0x80000000_00000000),
            (3, -1, 0x00000003_FFFFFFFF),
            (4, -1, 0x00000004_FFFFFFFF),
            (3, -2, 0x00000003_FFFFFFFE),
        ],
    )
    def test_seed(self, seed: int, seed2: int, combined: int) -> None:
        """Each pair is another seed. TensorFlow extends seed2 with its sign, so that a negative one swallows seed."""
        assert plan_forward(FORWARD, ForwardAttributes(seed=seed, seed2=seed2)).problem.seed == combined

    def test_missing_lengths_and_host_reserved(self) -> None:
        assert plan_forward(replace(FORWARD, sequence_lengths=None), ForwardAttributes()).problem.max_seq_length == 5
        assert plan_backprop(replace(BACKPROP, host_reserved=None), RnnAttributes()).problem.is_training


LSTM: dict[str, Any] = {"rnn_mode": "lstm", "direction": "bidirectional", "num_proj": 3, "dropout": 0.25}
LSTM_PARAMS = 2 * (24 * (4 + 3) + 18) + 2 * (24 * (6 + 3) + 18) + 4 * 48
GRU_PARAMS = 18 * (4 + 6) + 18 * (6 + 6) + 2 * 36


class TestPlan:
    """Two layers: a bidirectional lstm with a projection and dropout, and a unidirectional gru; B = 2, T = 5."""

    @pytest.mark.parametrize("is_training", [True, False])
    @pytest.mark.parametrize("time_major", [True, False])
    def test_forward_lstm(self, time_major: bool, is_training: bool) -> None:
        hidden, cell = ((4, 2, 3), (4, 2, 6)) if time_major else ((2, 4, 3), (2, 4, 6))
        first = (5, 2) if time_major else (2, 5)
        inputs = ForwardInputs(zeros(*first, 4), zeros(*hidden), zeros(LSTM_PARAMS), zeros(*cell))
        attributes = ForwardAttributes(**LSTM, time_major=time_major, is_training=is_training)
        planned = plan_forward(inputs, attributes)
        assert planned.problem == Problem(
            network=Network(Mode.LSTM, 2, 2, input_size=4, num_units=6, num_proj=3),
            dtype=np.dtype(np.float32),
            max_seq_length=5,
            batch=2,
            time_major=time_major,
            dropout=0.25 if is_training else 0.0,
            seed=0,
            is_training=is_training,
        )
        # Header; gates, two values of each unit, output; input of the upper pseudo-layers.
        reserve = 128 // 4 + (5 + 2) * 2 * (4 * (24 + 12 + 3) + 2 * 6)
        shapes = [(*first, 6), hidden, cell, *([(reserve,), (128,)] if is_training else [(), ()])]
        assert [spec.shape for spec in planned.output_specs] == shapes
        assert [spec.dtype for spec in planned.output_specs] == [np.float32] * 4 + [np.int8]

    @pytest.mark.parametrize("dtype", [np.float16, np.float64])
    @pytest.mark.parametrize("time_major", [True, False])
    def test_gru(self, time_major: bool, dtype: type) -> None:
        hidden = zeros(2, 2, 6, dtype=dtype)
        first = (5, 2) if time_major else (2, 5)
        inputs = ForwardInputs(zeros(*first, 4, dtype=dtype), hidden, zeros(GRU_PARAMS, dtype=dtype))
        forward = plan_forward(inputs, ForwardAttributes(rnn_mode="gru", time_major=time_major))
        # 16 bits are computed with, and kept in, float32. cuDNN keeps what the second layer reads, too.
        reserve = 128 + (8 if dtype is np.float64 else 4) * (5 + 2) * 2 * (2 * (18 + 12 + 6) + 6)
        shapes = [spec.shape for spec in forward.output_specs]
        assert shapes == [(*first, 6), (2, 2, 6), (), (reserve // np.dtype(dtype).itemsize,), (128,)]
        backprop = plan_backprop(backprop_of(inputs), RnnAttributes(rnn_mode="gru", time_major=time_major))
        assert backprop.problem == forward.problem
        assert [spec.shape for spec in backprop.output_specs] == [(*first, 4), (2, 2, 6), (), (GRU_PARAMS,)]
        assert {spec.dtype for spec in backprop.output_specs} == {np.dtype(dtype)}

    def test_backprop_lstm(self) -> None:
        planned = plan_backprop(BACKPROP, RnnAttributes())
        assert [spec.shape for spec in planned.output_specs] == [(5, 3, 4), (1, 3, 6), (1, 3, 6), (288,)]
