"""Layers on a server whose device has memory of its own: what travels, when, and that it is given back."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, tensor_pb2
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import RawCalls
from tests.servers.separate_device import SeparateDevice, separate_families

X = np.random.RandomState(0).standard_normal((4, 5, 6, 3)).astype(np.float32)
DY = np.random.RandomState(1).standard_normal(X.shape).astype(np.float32)
WEIGHTS = np.array([1, 0.5, 0, 2], np.float32)
A, B = np.full((4, 1, 1, 3), 1.5, np.float32), np.full((4, 1, 1, 3), 0.25, np.float32)
CHANNEL_BYTES = 3 * 4
VARIABLE_BYTES = 4 * CHANNEL_BYTES
VARIABLE_NAMES = ["beta", "gamma", "moving_mean", "moving_variance"]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused": ({}, {}),
    "in place": ({"updates_collections": None}, {}),
    "an activation with what it saved": ({"activation_fn": "gelu"}, {}),
    "an activation of its result": ({"activation_fn": "relu"}, {}),
    "weights": ({}, {"batch_weights": WEIGHTS}),
    "renorm": ({"renorm": True, "renorm_clipping": {"rmax": 1.5}}, {}),
    "renorm as it was": ({"renorm": True, "renorm_zero_debias": True}, {}),
    "an adjustment": ({}, {"adjustment": (A, B)}),
    "an adjustment that is drawn": (
        {"adjustment": gradserve.RandomAdjustment(scale=(0.9, 1.1), bias=(-0.1, 0.1), seed=3)},
        {},
    ),
    "zero debias": ({"zero_debias_moving_mean": True}, {}),
    "regularizers": ({"param_regularizers": {"gamma": gradserve.Regularizer("l2", l2=0.1)}}, {}),
}


@pytest.fixture
def device() -> SeparateDevice:
    return SeparateDevice()


@pytest.fixture
def server(device: SeparateDevice) -> Iterator[LocalServer]:
    parts = Parts(choose_device=lambda *_: device, make_families=lambda *_: separate_families(device))
    with LocalServer(parts=parts) as local:
        yield local


@pytest.fixture
def client(server: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


@pytest.fixture
def layer(client: gradserve.Client) -> gradserve.BatchNormLayer:
    return client.batch_norm(scale=True, decay=0.9, scope="layer")


def used_bytes(client: gradserve.Client) -> float:
    return client.server_info().usage["num_bytes"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("arguments", "call"), CASES.values(), ids=CASES)
def test_it_computes_what_a_server_on_the_cpu_does(
    client: gradserve.Client, arguments: dict[str, Any], call: dict[str, Any]
) -> None:
    results = []
    with LocalServer() as local, gradserve.connect(local.address, timeout=PATIENCE_SECONDS) as on_cpu:
        for each in (client, on_cpu):
            layer = each.batch_norm(scale=True, decay=0.9, **arguments)
            forward = layer.forward(X, **call)
            gradients = vars(layer.backward(DY, forward))
            layer.run_updates()
            gradients |= {f"regularization/{k}": v for k, v in gradients.pop("regularization").items()}
            found = {"y": forward.outputs, **gradients, **layer.variables}
            found |= {f"loss/{name}": loss for name, loss in forward.regularization_losses.items()}
            results.append({name: array for name, array in found.items() if array is not None})
    separate, expected = results
    assert set(separate) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(separate[name], array, 1e-6, 1e-6, err_msg=name)


def test_inputs_and_variables_go_in_and_outputs_come_out(
    layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    layer(X)
    assert device.copied_in == X.nbytes + VARIABLE_BYTES
    assert device.copied_out == X.nbytes


def test_variables_go_in_once(layer: gradserve.BatchNormLayer, device: SeparateDevice) -> None:
    for _ in range(3):
        layer(X)
        layer.run_updates()
    assert device.copied_in == 3 * X.nbytes + VARIABLE_BYTES
    assert device.copied_out == 3 * X.nbytes


def test_variables_go_in_once_when_they_are_updated_in_place(client: gradserve.Client, device: SeparateDevice) -> None:
    layer = client.batch_norm(scale=True, updates_collections=None, zero_debias_moving_mean=True)
    for _ in range(3):
        layer(X)
    assert device.copied_in == 3 * X.nbytes + VARIABLE_BYTES + CHANNEL_BYTES + 4
    assert device.copied_out == 3 * X.nbytes


def test_a_stored_input_goes_in_once_and_can_be_read_still(
    client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    x = client.put(X)
    for _ in range(3):
        layer(x)
    assert device.copied_in == X.nbytes + VARIABLE_BYTES
    assert np.array_equal(client.get(x), X)


def test_weights_and_an_adjustment_go_in(client: gradserve.Client, device: SeparateDevice) -> None:
    layer = client.batch_norm(scale=True)
    layer(X, adjustment=(A, B))
    assert device.copied_in == X.nbytes + VARIABLE_BYTES + A.nbytes + B.nbytes
    layer(X, batch_weights=WEIGHTS)
    assert device.copied_in == 2 * X.nbytes + VARIABLE_BYTES + A.nbytes + B.nbytes + WEIGHTS.nbytes


def test_kept_outputs_do_not_travel(
    client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    outputs = layer(X, keep=True)
    assert device.copied_out == 0
    assert abs(client.get(outputs).mean()) < 1e-6
    assert device.copied_out == X.nbytes


def test_what_is_saved_never_travels(client: gradserve.Client, device: SeparateDevice) -> None:
    layer = client.batch_norm(scale=True, activation_fn="gelu")
    forward = layer.forward(X, keep=True)
    copied_in = device.copied_in
    gradients = layer.backward(DY, forward, keep=True)
    assert device.copied_in - copied_in == DY.nbytes
    assert device.copied_out == 0
    layer.run_updates()
    assert (device.copied_in - copied_in, device.copied_out) == (DY.nbytes, 0)
    assert client.get(gradients.inputs).shape == X.shape
    assert device.copied_out == X.nbytes


def test_a_kept_gradient_stays_where_it_is(
    client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    first = layer.forward(X, keep=True)
    second = client.batch_norm(scale=True).forward(first.outputs, keep=True)
    assert device.copied_in == X.nbytes + 2 * VARIABLE_BYTES
    assert device.copied_out == 0
    assert client.get(second.outputs).shape == X.shape


def test_a_stored_gradient_goes_in_once(
    client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    dy = client.put(DY)
    forward = layer.forward(X)
    copied_in = device.copied_in
    gradients = [layer.backward(dy, forward, retain=True) for _ in range(3)]
    assert device.copied_in - copied_in == DY.nbytes
    assert device.copied_out == X.nbytes + 3 * (X.nbytes + 2 * CHANNEL_BYTES)
    assert np.array_equal(gradients[0].inputs, gradients[2].inputs)


def test_regularization_losses_come_out(client: gradserve.Client, device: SeparateDevice) -> None:
    layer = client.batch_norm(
        param_initializers={"beta": np.array([1, -2, 3], np.float32)},
        param_regularizers={"beta": gradserve.Regularizer("l1", l1=0.5)},
    )
    forward = layer.forward(X, keep=True)
    assert forward.regularization_losses == {"beta": 3.0}
    assert device.copied_out == np.float64().nbytes
    assert np.array_equal(layer.backward(DY, forward).regularization["beta"], np.array([0.5, -0.5, 0.5], np.float32))


def test_variables_come_out_when_they_are_read(
    client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    layer(X, keep=True)
    assert list(layer.variables) == VARIABLE_NAMES
    assert device.copied_out == VARIABLE_BYTES


def test_variables_by_handle_do_not_travel(
    server: LocalServer, client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    layer(X, keep=True)
    request = messages_pb2.GetBatchNormVariablesRequest(
        layer=batch_norm_pb2.BatchNormLayerRef(name="layer"), names=["gamma"]
    )
    request.placement.mode = tensor_pb2.Placement.MODE_KEEP
    with RawCalls(server.address) as raw:
        (gamma,) = raw.call("GetBatchNormVariables", request).variables
    assert device.copied_out == 0
    with RawCalls(server.address) as raw:
        raw.call(
            "SetBatchNormVariables",
            messages_pb2.SetBatchNormVariablesRequest(
                layer=request.layer, variables=[layer_pb2.NamedTensor(name="beta", tensor=gamma.tensor)]
            ),
        )
    outputs = layer(X, keep=True)
    assert (device.copied_in, device.copied_out) == (2 * X.nbytes + VARIABLE_BYTES, 0)
    assert abs(client.get(outputs).mean() - 1) < 1e-6


def test_variables_that_no_forward_has_used_are_still_on_the_host(
    client: gradserve.Client, device: SeparateDevice
) -> None:
    layer = client.batch_norm(scale=True, dtype="float32", input_shape=X.shape)
    assert np.array_equal(layer.variables["gamma"], np.ones(3, np.float32))
    assert (device.copied_in, device.copied_out) == (0, 0)


@pytest.mark.parametrize("by_handle", [False, True], ids=["inline", "by handle"])
def test_a_variable_that_was_set_goes_in_once(
    client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice, by_handle: bool
) -> None:
    layer(X)
    copied_in = device.copied_in
    beta = np.array([1, 2, 3], np.float32)
    layer.set_variables({"beta": client.put(beta) if by_handle else beta})
    assert device.copied_in == copied_in
    assert np.array_equal(layer.variables["beta"], beta)
    for _ in range(2):
        np.testing.assert_allclose(layer(X).mean((0, 1, 2)), beta, atol=1e-6)
    assert device.copied_in - copied_in == 2 * X.nbytes + beta.nbytes


def test_a_variable_is_set_by_a_result_that_stays_where_it_is(
    client: gradserve.Client, layer: gradserve.BatchNormLayer, device: SeparateDevice
) -> None:
    forward = layer.forward(X, keep=True)
    gradients = layer.backward(DY, forward, keep=True)
    copied = device.copied_in, device.copied_out
    assert gradients.beta is not None
    layer.set_variables({"beta": gradients.beta})
    outputs = layer(forward.outputs, keep=True)
    assert (device.copied_in, device.copied_out) == copied
    expected = DY.sum((0, 1, 2))
    client.delete(gradients.beta)
    np.testing.assert_allclose(client.get(outputs).mean((0, 1, 2)), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer.variables["beta"], expected, rtol=1e-4, atol=1e-4)


def test_an_initial_value_may_be_a_result(client: gradserve.Client, layer: gradserve.BatchNormLayer) -> None:
    gradients = layer.backward(DY, layer.forward(X), keep=True)
    other = client.batch_norm(param_initializers={"beta": gradients.beta}, dtype="float32", input_shape=X.shape)
    np.testing.assert_allclose(other.variables["beta"], DY.sum((0, 1, 2)), rtol=1e-4, atol=1e-4)


def test_memory_is_given_back(client: gradserve.Client) -> None:
    layer = client.batch_norm(scale=True, activation_fn="gelu", scope="layer")
    forward = layer.forward(X, keep=True)
    # Inputs, what the activation is a function of, mean and variance, beta and gamma, and the variance of the update.
    kept = 2 * X.nbytes + 2 * CHANNEL_BYTES + 2 * CHANNEL_BYTES + CHANNEL_BYTES
    assert layer.describe().num_bytes == VARIABLE_BYTES + kept
    assert used_bytes(client) == VARIABLE_BYTES + kept + X.nbytes
    layer.backward(DY, forward)
    assert used_bytes(client) == VARIABLE_BYTES + 2 * CHANNEL_BYTES + X.nbytes
    layer.run_updates()
    assert used_bytes(client) == VARIABLE_BYTES + X.nbytes
    client.delete(forward.outputs)
    layer.delete()
    assert used_bytes(client) == 0
