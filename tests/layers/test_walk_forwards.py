"""Forwards of a layer on a real server: which one a gradient is of, and tensors that stay there."""

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import TensorHandle
from tests.layers.small_batch import AXES, DY, LARGE, NORMALIZED, X, close
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("_prepared_ops")  # so that equal calls give equal bits


def test_very_many_forwards_are_named_in_several_requests(client: gradserve.Client) -> None:
    bn = client.batch_norm()
    forward = bn.forward(X)
    assert bn.run_updates([*(str(number) for number in range(70_000)), forward]) == 1
    assert bn.release(*[forward] * 70_000) == 1


def test_a_call_lets_go_of_the_one_before(client: gradserve.Client) -> None:
    bn = client.batch_norm(updates_collections=None)
    for _ in range(5):
        bn(X)
    assert bn.describe().num_forwards == 1


def test_several_forwards_and_one_backward_each(client: gradserve.Client) -> None:
    bn = client.batch_norm(scale=True)
    first, second = bn.forward(X), bn.forward(X[:2])
    assert bn.backward(DY, first).inputs.shape == X.shape
    assert bn.backward(DY[:2]).inputs.shape == X[:2].shape
    with pytest.raises(gradserve.AbortedError):
        bn.backward(DY, first)
    assert bn.run_updates([second]) == 1
    assert bn.run_updates() == 1


def test_a_retained_forward(client: gradserve.Client) -> None:
    bn = client.batch_norm()
    bn(X)
    once = bn.backward(DY, retain=True)
    bn.set_variables({"beta": [7, 7, 7]})  # the forward's own are used
    again = bn.backward(DY)
    assert np.array_equal(once.inputs, again.inputs)


def test_a_gradient_of_another_shape_is_refused_and_the_forward_kept(client: gradserve.Client) -> None:
    bn = client.batch_norm()
    bn(X)
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        bn.backward(DY[:2])
    assert error.value.field == "outputs_gradient"
    bn.backward(DY)


def test_a_gradient_that_does_not_exist_leaves_the_forward(client: gradserve.Client) -> None:
    bn = client.batch_norm()
    bn(X)
    gone = client.put(DY)
    client.delete(gone)
    with pytest.raises(gradserve.NotFoundError) as error:
        bn.backward(gone)
    assert error.value.field == "outputs_gradient.handle"
    close(bn.backward(DY).beta, DY.sum(AXES))


def test_a_forward_that_is_gone_gives_way_to_the_one_before(client: gradserve.Client, name: str) -> None:
    bn = client.batch_norm(scope=name)
    first, second = bn.forward(X), bn.forward(X[:2])
    with gradserve.connect(client.address, timeout=PATIENCE_SECONDS) as other:
        assert other.batch_norm(scope=name).release(second) == 1
    with pytest.raises(gradserve.AbortedError) as error:
        bn.backward(DY[:2])
    assert error.value.field == "forward_id"
    assert bn.backward(DY).inputs.shape == first.outputs.shape


def test_a_forward_that_was_released(client: gradserve.Client) -> None:
    bn = client.batch_norm()
    forward = bn.forward(X)
    assert bn.release(forward) == 1
    assert bn.run_updates([forward]) == 0
    with pytest.raises((gradserve.AbortedError, gradserve.NotFoundError)):
        bn.backward(DY, forward)


def test_inputs_that_are_refused_change_nothing(client: gradserve.Client) -> None:
    bn = client.batch_norm(updates_collections=None)
    bn(X)
    before = bn.describe()
    for inputs in (X[..., :2], X[0, 0, 0], X.astype(np.float64)):
        with pytest.raises(gradserve.InvalidArgumentError):
            bn(inputs)
    with pytest.raises(gradserve.InvalidArgumentError):
        bn(X, batch_weights=[1, 2])
    after = bn.describe()
    assert (after.num_updates, after.num_forwards) == (before.num_updates, before.num_forwards)


def test_a_chain_on_the_server(client: gradserve.Client) -> None:
    bn = client.batch_norm(activation_fn="relu")
    images = client.put(X)
    outputs = bn(images, keep=True)
    assert isinstance(outputs, TensorHandle)
    close(client.get(outputs), np.maximum(NORMALIZED, 0))
    gradients = bn.backward(outputs, keep=True)
    assert isinstance(gradients.inputs, TensorHandle)
    assert gradients.beta is not None
    assert client.get(gradients.beta).shape == (3,)
    accumulator = client.conditional_accumulator("float32", (3,))
    accumulator.apply_grad(gradients.beta)
    close(accumulator.take_grad(1), client.get(gradients.beta))
    client.delete(images, outputs, gradients.inputs, gradients.beta)


def test_large_tensors(client: gradserve.Client) -> None:
    bn = client.batch_norm()
    stored = len(client.list_tensors())
    outputs = bn(LARGE)
    close(outputs.mean(AXES), np.zeros(16))
    gradient = np.ones_like(LARGE)
    close(bn.backward(gradient).inputs, np.zeros_like(LARGE))
    assert len(client.list_tensors()) == stored
