"""The server's complaints blame the argument that the caller gave, by its name."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from tests.arguments.calls import GRU, GRU_GRAD, NORMALIZE, NORMALIZE_GRAD, REQUIRED, RNN, RNN_CANONICAL, RNN_GRAD, ones

NOBODY = gradserve.TensorHandle("nobody", np.dtype(np.float32), (2,))
OPS = {
    "FusedBatchNorm": NORMALIZE,
    "FusedBatchNormV2": NORMALIZE,
    "FusedBatchNormV3": NORMALIZE,
    "FusedBatchNormGrad": NORMALIZE_GRAD,
    "FusedBatchNormGradV3": NORMALIZE_GRAD,
    "GRUBlockCell": GRU,
    "GRUBlockCellGrad": GRU_GRAD,
    "CudnnRNN": RNN,
    "CudnnRNNV3": RNN,
    "CudnnRNNBackprop": {**RNN_GRAD, "reserve_space": ones(1)},
    "CudnnRNNBackpropV3": {**RNN_GRAD, "reserve_space": ones(1), "host_reserved": np.ones(1, np.int8)},
}
OF_LSTM = ("input_c", "output_c", "output_c_backprop")
"""Inputs that may be None."""
INPUTS = [(op, name) for op, arguments in OPS.items() for name in arguments]


def begins_with(name: str) -> str:
    return rf"^{re.escape(name)}: no tensor with the handle 'nobody' \[GS_NO_TENSOR\]$"


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_the_input_whose_handle_is_gone(client: gradserve.Client, op: str, name: str) -> None:
    with pytest.raises(gradserve.NotFoundError, match=begins_with(name)) as raised:
        getattr(client.raw_ops, op)(**{**OPS[op], name: NOBODY})
    assert raised.value.field == f"{name}.handle"


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in INPUTS if name not in OF_LSTM])
def test_the_input_that_is_none(client: gradserve.Client, op: str, name: str) -> None:
    """NumPy would make NaN of None."""
    with pytest.raises(gradserve.InvalidArgumentError, match=f"expected an array or numbers for {name}, got None"):
        getattr(client.raw_ops, op)(**{**OPS[op], name: None})


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_the_input_of_another_dtype(client: gradserve.Client, op: str, name: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=rf"\b({name}|attr 'T')") as raised:
        getattr(client.raw_ops, op)(**{**OPS[op], name: np.ones(np.shape(OPS[op][name]), np.uint16)})
    assert raised.value.field is not None


@pytest.mark.parametrize("name", ["weights", "biases"])
def test_the_element_of_a_list(client: gradserve.Client, name: str) -> None:
    tensors = [*RNN_CANONICAL[name][:-1], NOBODY]
    with pytest.raises(gradserve.NotFoundError, match=begins_with(f"{name}[{len(tensors) - 1}]")):
        client.raw_ops.CudnnRNNCanonicalToParamsV2(**{**RNN_CANONICAL, name: tensors})


def test_what_is_called_otherwise_in_the_request(client: gradserve.Client) -> None:
    arguments = {**REQUIRED["raw_ops.CudnnRNNParamsToCanonical"], "num_params": 3}
    with pytest.raises(gradserve.InvalidArgumentError, match="^num_params: Number of params"):
        client.raw_ops.CudnnRNNParamsToCanonical(**arguments)


@pytest.fixture(scope="module")
def bn(server_address: str) -> Iterator[Any]:
    with gradserve.connect(server_address) as client, client.batch_norm() as layer:
        layer.forward(ones(4, 3))
        yield layer


X = ones(4, 3)
LAYER_CALLS: dict[str, tuple[Any, str]] = {
    "inputs": (lambda bn: bn.forward(NOBODY), begins_with("inputs")),
    "batch_weights": (lambda bn: bn(X, batch_weights=NOBODY), begins_with("batch_weights")),
    "adjustment": (lambda bn: bn(X, adjustment=(X, NOBODY)), begins_with("adjustment_bias")),
    "dtype of inputs": (lambda bn: bn(np.ones((4, 3), np.int8)), "^inputs: expected a dtype out of"),
    "dy": (lambda bn: bn.backward(NOBODY, bn.forward(X)), begins_with("dy")),
    "shape of dy": (lambda bn: bn.backward(ones(4, 2), bn.forward(X)), "^dy: expected the dtype and shape"),
    "variable": (lambda bn: bn.set_variables({"moving_mean": ones(3), "beta": NOBODY}), begins_with("beta")),
    "shape of a variable": (lambda bn: bn.set_variables({"beta": ones(2)}), r"^expected .* of shape \[3\] for beta"),
}


@pytest.mark.parametrize(("call", "message"), LAYER_CALLS.values(), ids=LAYER_CALLS)
def test_the_argument_of_a_layer(bn: Any, call: Any, message: str) -> None:
    with pytest.raises(gradserve.GradserveError, match=message):
        call(bn)


def test_the_argument_of_a_new_layer(client: gradserve.Client) -> None:
    with pytest.raises(gradserve.NotFoundError, match=begins_with("param_initializers[beta]")):
        client.batch_norm(param_initializers={"beta": NOBODY})
    with pytest.raises(
        gradserve.InvalidArgumentError, match="expected a dtype out of half, bfloat16, float, double, got int32"
    ):
        client.batch_norm(input_shape=(None, 3), dtype="int32")


def test_masked_arrays_and_values_that_do_not_fit(client: gradserve.Client, bn: Any) -> None:
    masked = np.ma.MaskedArray([1.0, 2.0, 3.0], [True, False, False])
    for value, message in ((masked, "got a masked array"), ([1.0, 2.0, 1e300], "which does not fit into float32")):
        for call in (
            lambda: client.raw_ops.FusedBatchNormV3(**{**NORMALIZE, "scale": value}),  # noqa: B023
            lambda: bn.set_variables({"beta": value}),  # noqa: B023
        ):
            with pytest.raises(gradserve.InvalidArgumentError, match=message):
                call()
    with pytest.raises(gradserve.InvalidArgumentError, match="for value, got a masked array"):
        client.put(masked)
    with pytest.raises(gradserve.InvalidArgumentError, match=r"for values\[1\], got a masked array"):
        client.put_all([1.0, masked])
