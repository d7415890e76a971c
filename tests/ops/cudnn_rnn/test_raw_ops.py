"""The CudnnRNN ops through the client: PyTorch's numbers, TensorFlow's names and versions."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import TensorHandle
from tests.golden.cudnn_rnn import Case, assert_output, assert_outputs, load_cases
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("_prepared_ops")  # so that equal calls give equal bits

CASES = load_cases()
PLAIN = next(
    case
    for case in CASES
    if case.dtype == "float32"
    and case.attributes.time_major
    and case.inputs.sequence_lengths is None
    and case.attributes.rnn_mode == "lstm"
    and not case.attributes.num_proj
    and case.attributes.input_mode != "skip_input"
)
"""An lstm that all versions know."""
FORWARD_OPS = ("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3")
BACKPROP_OPS = ("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3")
PARAMS_OPS = (
    "CudnnRNNParamsSize",
    "CudnnRNNCanonicalToParams",
    "CudnnRNNCanonicalToParamsV2",
    "CudnnRNNParamsToCanonical",
    "CudnnRNNParamsToCanonicalV2",
)
OUTPUT_NAMES = {
    "CudnnRNN": ("output", "output_h", "output_c", "reserve_space"),
    "CudnnRNNV2": ("output", "output_h", "output_c", "reserve_space", "host_reserved"),
    "CudnnRNNV3": ("output", "output_h", "output_c", "reserve_space", "host_reserved"),
    **dict.fromkeys(BACKPROP_OPS, ("input_backprop", "input_h_backprop", "input_c_backprop", "params_backprop")),
}
NETWORK: dict[str, Any] = {"num_layers": 2, "num_units": 3, "input_size": 5}


def given(values: Any, signature: Callable[..., Any]) -> dict[str, Any]:
    """Returns the fields of a dataclass that a call takes, without those that are None."""
    taken = inspect.signature(signature).parameters
    named = {field.name: getattr(values, field.name) for field in fields(values)}
    return {name: value for name, value in named.items() if name in taken and value is not None}


def forward_arguments(case: Case, call: Callable[..., Any]) -> dict[str, Any]:
    return given(case.inputs, call) | given(case.attributes, call)


def backprop_arguments(case: Case, outputs: Any, call: Callable[..., Any]) -> dict[str, Any]:
    known = {**forward_arguments(case, call), **given(case.gradients, call), **outputs._asdict()}
    return {name: value for name, value in known.items() if name in inspect.signature(call).parameters}


def equal(ours: Any, theirs: Any) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backprop(client: gradserve.Client, case: Case) -> None:
    ops = client.raw_ops
    outputs = ops.CudnnRNNV3(**forward_arguments(case, ops.CudnnRNNV3))
    assert_outputs(case, outputs._asdict())
    gradients = ops.CudnnRNNBackpropV3(**backprop_arguments(case, outputs, ops.CudnnRNNBackpropV3))
    assert_outputs(case, gradients._asdict())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("forward", "backprop"), list(zip(FORWARD_OPS, BACKPROP_OPS, strict=True)))
def test_every_version(client: gradserve.Client, forward: str, backprop: str, keep: bool) -> None:
    before = client.list_tensors()
    call, gradient = getattr(client.raw_ops, forward), getattr(client.raw_ops, backprop)
    outputs = call(**forward_arguments(PLAIN, call), keep=keep)
    gradients = gradient(**backprop_arguments(PLAIN, outputs, gradient), keep=keep)
    for op, results in ((forward, outputs), (backprop, gradients)):
        assert results._fields == OUTPUT_NAMES[op]
        assert all(isinstance(result, TensorHandle) is keep for result in results)
    if keep:
        assert len(client.list_tensors()) - len(before) == len(outputs) + len(gradients)
        assert_output(PLAIN, "params_backprop", client.get(gradients.params_backprop))
        client.delete(*outputs, *gradients)
    else:
        assert_output(PLAIN, "output", outputs.output)
        assert_output(PLAIN, "input_backprop", gradients.input_backprop)


def test_inference(client: gradserve.Client) -> None:
    call = client.raw_ops.CudnnRNNV3
    outputs = call(**{**forward_arguments(PLAIN, call), "is_training": False, "dropout": 0.9})
    assert_output(PLAIN, "output", outputs.output)
    assert outputs.reserve_space.shape == outputs.host_reserved.shape == ()


def test_dropout_depends_on_the_seed_alone(client: gradserve.Client) -> None:
    case = next(case for case in CASES if case.dtype == "float32" and case.problem.network.num_layers == 3)
    call = client.raw_ops.CudnnRNNV3

    def output(**changes: Any) -> Any:
        return call(**{**forward_arguments(case, call), "dropout": 0.5, **changes}).output

    assert np.array_equal(output(seed=1), output(seed=1))
    assert not np.array_equal(output(seed=1), output(seed=2))
    assert not np.array_equal(output(seed=1), output(seed=1, seed2=1))
    assert not np.array_equal(output(seed=1), output(seed=1, dropout=0.0))


def test_a_reserve_space_of_another_call_is_refused(client: gradserve.Client) -> None:
    ops = client.raw_ops
    first, second = (ops.CudnnRNNV3(**forward_arguments(PLAIN, ops.CudnnRNNV3)) for _ in range(2))
    arguments = backprop_arguments(PLAIN, first, ops.CudnnRNNBackpropV3)
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        ops.CudnnRNNBackpropV3(**{**arguments, "host_reserved": second.host_reserved})
    assert raised.value.field in ("reserve_space", "host_reserved")
    noise = np.random.RandomState(0).standard_normal(first.reserve_space.shape).astype(np.float32)
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        ops.CudnnRNNBackpropV3(**{**arguments, "reserve_space": noise})
    assert raised.value.field == "reserve_space"


@pytest.mark.parametrize("lengths", [[0, 1, 1], [1, 99, 1], [-1, 1, 1]])
def test_sequence_lengths_out_of_range(client: gradserve.Client, lengths: list[int]) -> None:
    call = client.raw_ops.CudnnRNNV3
    batch = PLAIN.inputs.input.shape[1]
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        call(**{**forward_arguments(PLAIN, call), "sequence_lengths": (lengths * batch)[:batch]})
    assert raised.value.field == "sequence_lengths"


# --- Parameters


@pytest.mark.parametrize("num_proj", [0, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_params_and_their_canonical_form(client: gradserve.Client, num_proj: int, keep: bool) -> None:
    ops = client.raw_ops
    network = {**NETWORK, "direction": "bidirectional", "num_proj": num_proj}
    (size,) = ops.CudnnRNNParamsSize(**network)
    params = np.arange(size, dtype=np.float32)
    counts: dict[str, Any] = {"num_params_weights": 4 * (9 if num_proj else 8), "num_params_biases": 32}
    canonical: Any = ops.CudnnRNNParamsToCanonicalV2(**network, params=params, **counts, keep=keep)
    assert (len(canonical.weights), len(canonical.biases)) == (counts["num_params_weights"], 32)
    parts = {"weights": canonical.weights, "biases": canonical.biases}
    back: Any = ops.CudnnRNNCanonicalToParamsV2(**network, **parts, keep=keep)
    assert np.array_equal(client.get(back) if keep else back, params)
    if keep:
        client.delete(back, *canonical.weights, *canonical.biases)


def test_the_first_version_has_one_count(client: gradserve.Client) -> None:
    ops = client.raw_ops
    size = int(ops.CudnnRNNParamsSize(**NETWORK, rnn_mode="gru")[0])
    params = np.arange(size, dtype=np.float64)
    canonical = ops.CudnnRNNParamsToCanonical(**NETWORK, rnn_mode="gru", params=params, num_params=12)
    back = ops.CudnnRNNCanonicalToParams(**NETWORK, rnn_mode="gru", weights=canonical.weights, biases=canonical.biases)
    assert np.array_equal(back, params)


@pytest.mark.parametrize("op", ["CudnnRNNCanonicalToParams", "CudnnRNNCanonicalToParamsV2"])
@pytest.mark.parametrize("stored", [False, True], ids=["inline", "by handle"])
def test_matrices_and_biases_of_any_shape(client: gradserve.Client, op: str, stored: bool) -> None:
    """TensorFlow looks at the number of elements alone; its own converter passes vectors."""
    ops = client.raw_ops
    params = np.arange(int(ops.CudnnRNNParamsSize(**NETWORK)[0]), dtype=np.float32)
    canonical = ops.CudnnRNNParamsToCanonical(**NETWORK, params=params, num_params=16)
    weights = [np.ravel(matrix) for matrix in canonical.weights]
    biases = [bias.reshape(1, 3, 1) for bias in canonical.biases]
    given = [list(map(client.put, arrays)) if stored else arrays for arrays in (weights, biases)]
    assert np.array_equal(getattr(ops, op)(**NETWORK, weights=given[0], biases=given[1]), params)
    if stored:
        client.delete(*given[0], *given[1])
    short = [weights[0][:-1], *weights[1:]]
    with pytest.raises(gradserve.InvalidArgumentError, match=r"weights\[0\] must have 15 elements") as raised:
        getattr(ops, op)(**NETWORK, weights=short, biases=biases)
    assert raised.value.field == "weights[0]"


def params_arguments(op: str) -> dict[str, Any]:
    arrays: dict[str, dict[str, Any]] = {
        "CudnnRNNParamsSize": {},
        "CudnnRNNCanonicalToParams": {"weights": [np.zeros(1)] * 2, "biases": [np.zeros(1)] * 2},
        "CudnnRNNParamsToCanonical": {"params": np.zeros(4), "num_params": 2},
        "CudnnRNNParamsToCanonicalV2": {"params": np.zeros(4), "num_params_weights": 2, "num_params_biases": 2},
    }
    arrays["CudnnRNNCanonicalToParamsV2"] = arrays["CudnnRNNCanonicalToParams"]
    return {"num_layers": 1, "num_units": 1, "input_size": 1, "rnn_mode": "rnn_tanh", **arrays[op]}


@pytest.mark.parametrize("op", PARAMS_OPS)
class TestDropoutOfOpsOnParameters:
    """It has no effect; TensorFlow's ops have the arguments all the same."""

    def test_defaults_warn_of_nothing(self, client: gradserve.Client, op: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(client.raw_ops, op)(**params_arguments(op), dropout=0.0, seed=0, seed2=0)

    @pytest.mark.parametrize(("name", "value"), [("dropout", 0.5), ("seed", -1), ("seed2", np.int64(7))])
    def test_others_are_warned_of(self, client: gradserve.Client, op: str, name: str, value: Any) -> None:
        message = rf"^{name} of {op} has no effect: parameters do not depend on the dropout$"
        with pytest.warns(gradserve.IgnoredArgumentWarning, match=message) as caught:
            outputs = getattr(client.raw_ops, op)(**params_arguments(op), **{name: value})
        assert caught[0].filename == __file__
        assert str(outputs) == str(getattr(client.raw_ops, op)(**params_arguments(op)))

    @pytest.mark.parametrize(("name", "value"), [("dropout", "none"), ("seed", 1 << 31), ("seed", 0.5), ("seed2", "1")])
    def test_what_they_cannot_be(self, client: gradserve.Client, op: str, name: str, value: Any) -> None:
        with pytest.raises(gradserve.InvalidArgumentError) as raised:
            getattr(client.raw_ops, op)(**params_arguments(op), **{name: value})
        assert raised.value.field == name


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_dtype_of_the_size(client: gradserve.Client, dtype: str) -> None:
    size = client.raw_ops.CudnnRNNParamsSize(**NETWORK, S=dtype, T="bfloat16")
    assert (size.dtype, size.shape) == (np.dtype(dtype), (1,))


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "layers that are no scalar": (
        "CudnnRNNParamsSize",
        {"num_layers": [2]},
        "num_layers",
        "num_layers is not a scalar",
    ),
    "units that are no scalar": ("CudnnRNNParamsSize", {"num_units": [[3]]}, "num_units", "num_units is not a scalar"),
    "input that is no scalar": ("CudnnRNNParamsSize", {"input_size": [5]}, "input_size", "input_size is not a scalar"),
    "half a layer": ("CudnnRNNParamsSize", {"num_layers": 0.5}, "num_layers", "num_layers must be an int32"),
    "many layers": ("CudnnRNNParamsSize", {"num_layers": 1 << 31}, "num_layers", "num_layers must be an int32"),
    "no layers": ("CudnnRNNParamsSize", {"num_layers": 0}, "num_layers", "num_layers must be at least 1, got 0"),
    "more params than int32": ("CudnnRNNParamsSize", {"num_units": 100_000}, "s", "int32 cannot hold the params size"),
    "another T": ("CudnnRNNParamsSize", {"T": "int32"}, "T", "'T' of int32"),
    "another S": ("CudnnRNNParamsSize", {"S": "float32"}, "s", "'S' of float32"),
    "another mode": ("CudnnRNNParamsSize", {"rnn_mode": "tree"}, "rnn_mode", '"rnn_relu", "rnn_tanh", "lstm", "gru"'),
}


@pytest.mark.parametrize(("op", "changes", "field", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_refusals(client: gradserve.Client, op: str, changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        getattr(client.raw_ops, op)(**{**NETWORK, **changes})
    assert raised.value.field == field
    assert message in raised.value.message


# --- asyncio


@pytest.mark.parametrize(("forward", "backprop"), list(zip(FORWARD_OPS, BACKPROP_OPS, strict=True)))
async def test_both_faces_give_the_same(server_address: str, forward: str, backprop: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as client:
        call, gradient = getattr(client.raw_ops, forward), getattr(client.raw_ops, backprop)
        outputs = await call(**forward_arguments(PLAIN, call))
        gradients = await gradient(**backprop_arguments(PLAIN, outputs, gradient))
    assert_output(PLAIN, "output", outputs.output)
    assert_output(PLAIN, "params_backprop", gradients.params_backprop)


async def test_params_with_await(server_address: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as client:
        ops = client.raw_ops
        (size,) = await ops.CudnnRNNParamsSize(**NETWORK)
        params = np.arange(size, dtype=np.float32)
        counts: dict[str, Any] = {"num_params_weights": 16, "num_params_biases": 16}
        canonical = await ops.CudnnRNNParamsToCanonicalV2(**NETWORK, params=params, **counts)
        parts = {"weights": canonical.weights, "biases": canonical.biases}
        assert np.array_equal(await ops.CudnnRNNCanonicalToParamsV2(**NETWORK, **parts), params)
        first = await ops.CudnnRNNParamsToCanonical(**NETWORK, params=params, num_params=16)
        assert equal(first.weights, canonical.weights)
        assert np.array_equal(await ops.CudnnRNNCanonicalToParams(**NETWORK, **parts), params)


@pytest.mark.parametrize("op", [*FORWARD_OPS, *BACKPROP_OPS, *PARAMS_OPS])
def test_all_arguments_are_keywords(op: str) -> None:
    signature = inspect.signature(getattr(gradserve.RawOps, op))
    kinds = {parameter.kind for name, parameter in signature.parameters.items() if name != "self"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_every_version_is_called_here() -> None:
    known = {*FORWARD_OPS, *BACKPROP_OPS, *PARAMS_OPS}
    assert {name for name in vars(gradserve.RawOps) if name.startswith("CudnnRNN")} == known
