"""Inputs, outputs and variables, as the client sends and receives them."""

from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import BatchNormImplementation, TensorHandle
from gradserve_protocol.tensors import to_dtype
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import tensor_pb2
from tests.layers.client.fake_server import DY, HANDLE, LARGE, FakeLayerServer, X, array_of, inline, result_of

# --- Inputs and outputs

DTYPES: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "numbers": ([[1, 2, 3]], [1], ([1, 1, 1], 0), ["float32", "float32", "float32", "float32"]),
    "float64": (X.astype(np.float64), [1, 1], (1, 0), ["float64", "float64", "float64", "float64"]),
    "float16": (X.astype(np.float16), [1, 1], (1, 0), ["float16", "float32", "float32", "float32"]),
    "arrays": (X, np.ones(2), (np.ones(3, np.float16), np.ones(3)), ["float32", "float64", "float16", "float64"]),
}


@pytest.mark.parametrize(("inputs", "weights", "adjustment", "dtypes"), DTYPES.values(), ids=list(DTYPES))
def test_dtypes_of_inputs(
    server: FakeLayerServer, bn: Any, inputs: Any, weights: Any, adjustment: Any, dtypes: list[str]
) -> None:
    outputs = result_of(bn(inputs, True, weights, adjustment))
    request = server.last("BatchNormForward")
    tensors = [request.inputs, request.batch_weights, request.adjustment_scale, request.adjustment_bias]
    assert [array_of(tensor).dtype for tensor in tensors] == dtypes
    np.testing.assert_array_equal(outputs, inputs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_gradient_of_numbers_has_the_dtype_of_the_outputs(
    server: FakeLayerServer, bn: Any, dtype: str, by_name: bool
) -> None:
    x = X.astype(to_dtype(getattr(tensor_pb2, f"DATA_TYPE_{dtype.upper()}")))
    forward = result_of(bn.forward(x))
    result_of(bn.backward([[1, 1, 1]] * 2, forward if by_name else None))
    assert array_of(server.last("BatchNormBackward").outputs_gradient).dtype == x.dtype


def test_optional_inputs_are_left_out(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    sent = {part.name for part, _ in server.last("BatchNormForward").ListFields()}
    assert sent == {"layer", "inputs", "is_training", "forward_id", "placement"}


def test_options_of_a_forward(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn.forward(X, False, keep=True, keep_for_backward=True, lease=2.5, forward_id="f"))
    request = server.last("BatchNormForward")
    assert request.HasField("is_training")
    assert (request.is_training, request.keep_for_backward, request.forward_id) == (False, True, "f")
    assert request.lease.ToMilliseconds() == request.placement.lease.ToMilliseconds() == 2500
    assert request.placement.mode == tensor_pb2.Placement.MODE_KEEP


def test_inputs_by_handle_and_outputs_kept(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(HANDLE))
    assert server.last("BatchNormForward").inputs == tensor_pb2.Tensor(handle="mine")
    kept = result_of(bn(X, keep=True))
    assert kept == TensorHandle("kept-outputs", X.dtype, X.shape)
    gradients = result_of(bn.backward(kept, keep=True, lease=3))
    request = server.last("BatchNormBackward")
    assert request.outputs_gradient == tensor_pb2.Tensor(handle="kept-outputs")
    assert request.placement.lease.seconds == 3
    assert gradients.inputs == TensorHandle("kept", X.dtype, X.shape)


def test_large_inputs_are_uploaded_and_deleted(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(LARGE))
    assert server.last("BatchNormForward").inputs.handle.startswith("uploaded")
    result_of(bn.backward(LARGE))
    assert server.last("BatchNormBackward").outputs_gradient.handle.startswith("uploaded")
    assert len(server.of("DeleteTensors")) == 2
    assert not server.stored


def test_what_was_uploaded_is_deleted_when_a_call_is_refused(server: FakeLayerServer, bn: Any) -> None:
    server.failures["BatchNormForward"] = [gradserve.InvalidArgumentError("no")]
    with pytest.raises(gradserve.InvalidArgumentError, match=r"^no \[GS_\w+\]$"):
        result_of(bn(LARGE))
    assert server.of("DeleteTensors")
    assert not server.stored


def test_results_of_a_forward(server: FakeLayerServer, bn: Any) -> None:
    server.replies["BatchNormForward"] = {
        "implementation": batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_LEGACY,
        "regularization_losses": {"beta": 0.5},
        "drawn_adjustment_scale": inline(np.ones(3, np.float32)),
        "drawn_adjustment_bias": inline(np.zeros(3, np.float32)),
    }
    forward = result_of(bn.forward(X, keep=True))
    assert forward.implementation is BatchNormImplementation.LEGACY
    assert forward.regularization_losses == {"beta": 0.5}
    assert [each.tolist() for each in forward.drawn_adjustment] == [[1, 1, 1], [0, 0, 0]]
    assert forward.forward_id == server.last("BatchNormForward").forward_id
    assert forward.has_pending_updates
    assert isinstance(forward.outputs, TensorHandle)


def test_a_forward_without_an_adjustment(bn: Any) -> None:
    forward = result_of(bn.forward(X, is_training=False))
    assert (forward.drawn_adjustment, forward.forward_id, forward.has_pending_updates) == (None, None, False)
    assert (forward.regularization_losses, forward.warnings) == ({}, ())


def test_every_implementation_is_known() -> None:
    names = {name.removeprefix("BATCH_NORM_IMPLEMENTATION_") for name in batch_norm_pb2.BatchNormImplementation.keys()}  # noqa: SIM118
    assert names - {"UNSPECIFIED"} == {each.name for each in BatchNormImplementation}


def test_gradients(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    gradients = result_of(bn.backward(DY, retain=True))
    assert gradients.inputs.tolist() == DY.tolist()
    missing = ("beta", "gamma", "batch_weights", "adjustment_scale", "adjustment_bias")
    assert [getattr(gradients, name) for name in missing] == [None] * 5
    assert gradients.regularization == {}
    server.replies["BatchNormBackward"] = {
        f"{name}_gradient": inline([index]) for index, name in enumerate(missing)
    } | {
        "beta_regularization_gradient": inline([8.0]),
        "gamma_regularization_gradient": inline([9.0]),
    }
    gradients = result_of(bn.backward(DY))
    assert [getattr(gradients, name).tolist() for name in missing] == [[0], [1], [2], [3], [4]]
    assert {name: value.tolist() for name, value in gradients.regularization.items()} == {"beta": [8], "gamma": [9]}


@pytest.mark.parametrize(
    ("adjustment", "got"),
    [(np.ones((2, 3)), "ndarray"), ((X,), "1 values"), ([X, X, X], "3 values"), ((X, X, X), "3 values"), (1.0, "1.0")],
)
def test_an_adjustment_is_a_pair(server: FakeLayerServer, bn: Any, adjustment: Any, got: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        result_of(bn(X, adjustment=adjustment))
    assert error.value.message.endswith(f"expected a pair of tensors, (scale, bias), for adjustment, got {got}")
    assert error.value.field == "adjustment"
    assert not server.of("BatchNormForward")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"inputs": "images"}, "inputs"),
        ({"inputs": X, "batch_weights": ["a"]}, "batch_weights"),
        ({"inputs": X, "adjustment": (X, ["a"])}, "adjustment_bias"),
    ],
)
def test_inputs_that_are_no_numbers(bn: Any, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        result_of(bn(**arguments))
    assert error.value.field == field


# --- Variables


def test_variables_are_read(server: FakeLayerServer, bn: Any) -> None:
    assert {name: value.tolist() for name, value in result_of(bn.get_variables("gamma", "beta")).items()} == {
        "gamma": [0, 0, 0],
        "beta": [1, 1, 1],
    }
    assert list(server.last("GetBatchNormVariables").names) == ["gamma", "beta"]
    assert result_of(bn.get_variables()).keys() == {"beta", "moving_mean"}


def test_values_become_of_the_dtype_of_the_variable(client: Any, server: FakeLayerServer) -> None:
    server.variables = {"beta": "float32", "gamma": "float64"}
    bn = result_of(client.batch_norm(scope="bn"))
    result_of(bn.set_variables({"beta": np.ones(3), "gamma": [1, 2, 3]}))
    sent = {each.name: array_of(each.tensor) for each in server.last("SetBatchNormVariables").variables}
    assert {name: value.dtype for name, value in sent.items()} == {"beta": "float32", "gamma": "float64"}
    assert not server.of("DescribeBatchNormLayer")


def test_dtypes_of_variables_created_later_are_asked_for_once(server: FakeLayerServer, bn: Any) -> None:
    server.variables = {"beta": "float16"}
    for _ in range(2):
        result_of(bn.set_variables({"beta": [0, 0, 0]}))
        assert array_of(server.last("SetBatchNormVariables").variables[0].tensor).dtype == "float16"
    assert len(server.of("DescribeBatchNormLayer")) == 1


def test_the_server_says_what_is_wrong_with_an_unknown_variable(server: FakeLayerServer, bn: Any) -> None:
    server.failures["SetBatchNormVariables"] = [gradserve.NotFoundError("no variable 'delta'")]
    with pytest.raises(gradserve.NotFoundError, match="delta"):
        result_of(bn.set_variables({"delta": [0, 0, 0]}))


def test_values_by_handle(server: FakeLayerServer, bn: Any) -> None:
    server.variables = {"beta": "float32"}
    result_of(bn.set_variables({"beta": HANDLE}))
    assert server.last("SetBatchNormVariables").variables[0].tensor.handle == "mine"


def test_values_that_are_no_numbers(server: FakeLayerServer, bn: Any) -> None:
    server.variables = {"beta": "float32"}
    with pytest.raises(
        gradserve.InvalidArgumentError, match="expected an array or numbers for variable 'beta', got 'a'"
    ) as error:
        result_of(bn.set_variables({"beta": ["a"]}))
    assert error.value.field == "variables"
