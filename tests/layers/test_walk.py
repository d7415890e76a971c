"""Batch normalization layers through the client and a real server: a quick walk through all that a layer can do.

The numbers themselves are those of tests/golden; here simple ones suffice.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import BatchNormImplementation, Initializer, RandomAdjustment, Regularizer
from gradserve.testing import ConnectionFaults, FaultyProxy
from tests.layers.small_batch import AXES, COUNT, DY, LARGE, MEAN, NORMALIZED, VARIANCE, X, close
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("_prepared_ops")


T = TypeVar("T")


def test_a_step_of_training(client: gradserve.Client) -> None:
    bn = client.batch_norm(decay=0.9, scale=True)
    close(bn(X), NORMALIZED)
    gradients = bn.backward(DY)
    assert (gradients.inputs.shape, gradients.inputs.dtype) == (X.shape, X.dtype)
    close(gradients.inputs.sum(AXES), np.zeros(3))
    close(gradients.beta, DY.sum(AXES))
    close(gradients.gamma, (DY * NORMALIZED).sum(AXES))
    assert gradients.batch_weights is None
    assert gradients.adjustment_scale is None
    assert gradients.regularization == {}
    assert bn.run_updates() == 1
    close(bn.variables["moving_mean"], 0.1 * MEAN)
    bn.set_variables({"beta": [1, 2, 3], "gamma": np.full(3, 2.0)})
    close(bn(X), NORMALIZED * 2 + [1, 2, 3])


def test_inference_uses_the_moving_averages(client: gradserve.Client) -> None:
    bn = client.batch_norm(epsilon=0.0, dtype="float32", input_shape=(None, None, None, 3))
    bn.set_variables({"moving_mean": [5, 5, 5], "moving_variance": [4, 4, 4]})
    close(bn(X, is_training=False), (X - 5) / 2)
    forward = bn.forward(X, is_training=False, keep_for_backward=True)
    close(bn.backward(DY, forward).inputs, DY / 2)


@pytest.mark.parametrize("updates", ["update_ops", "mine"])
def test_delayed_updates_wait(client: gradserve.Client, updates: str) -> None:
    bn = client.batch_norm(decay=0.5, updates_collections=updates)
    bn(X)
    close(bn.variables["moving_mean"], np.zeros(3))
    bn(X, is_training=False)
    bn(X)
    assert bn.run_updates() == 2
    assert bn.run_updates() == 0
    close(bn.variables["moving_mean"], 0.75 * MEAN)


def test_updates_in_place_do_not(client: gradserve.Client) -> None:
    bn = client.batch_norm(decay=0.5, updates_collections=None)
    forward = bn.forward(X)
    assert not forward.has_pending_updates
    assert forward.implementation is BatchNormImplementation.FUSED
    variables = bn.variables
    close(variables["moving_mean"], 0.5 * MEAN)
    close(variables["moving_variance"], 0.5 + 0.5 * VARIANCE * COUNT / (COUNT - 1))
    assert bn.run_updates() == 0


def test_a_forward_sent_twice_counts_once(client: gradserve.Client) -> None:
    bn = client.batch_norm(decay=0.5, updates_collections=None)
    first, second = (bn.forward(X, forward_id="the same") for _ in range(2))
    close(first.outputs, second.outputs)
    close(bn.variables["moving_mean"], 0.5 * MEAN)
    assert bn.describe().num_updates == 1


@pytest.mark.parametrize("updates", [None, "update_ops"])
def test_forwards_count_once_whatever_the_network_does(server_address: str, name: str, updates: str | None) -> None:
    """By gRPC's own retries, and by repeating with the same id what it gave up."""
    faults = ConnectionFaults(mean_reads=10, seed=3)
    steps = 30
    with (
        FaultyProxy(server_address, faults) as proxy,
        gradserve.connect(proxy.address, timeout=PATIENCE_SECONDS, transport="grpc") as shaky,
        gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as direct,
    ):
        observed = direct.batch_norm(scope=name, updates_collections=updates)
        bn = repeated(lambda: shaky.batch_norm(scope=name, updates_collections=updates))
        for step in range(steps):
            repeated(partial(bn.forward, X, forward_id=f"step {step}", keep_for_backward=False))
            if step % 10 == 9:
                repeated(bn.run_updates)
        assert observed.describe().num_updates == steps
        assert observed.delete()
    assert sum(faults.happened.values()) > 5


def repeated(call: Callable[[], T]) -> T:
    for _ in range(100):
        with contextlib.suppress(gradserve.UnavailableError):
            return call()
    raise AssertionError("not acknowledged in 100 attempts")


def test_updates_of_a_collection_are_those_of_all_clients(client: gradserve.Client, name: str) -> None:
    with gradserve.connect(client.address, timeout=PATIENCE_SECONDS) as other:
        ours = client.batch_norm(decay=0.5, scope=name, updates_collections=name)
        theirs = other.batch_norm(decay=0.5, scope=f"{name}/2", updates_collections=[name, "update_ops"])
        ours(X)
        theirs(X)
        assert client.run_updates(name) == 2
        assert (ours.run_updates(), theirs.run_updates()) == (0, 0)
        close(theirs.variables["moving_mean"], 0.5 * MEAN)
        for each in (ours, theirs):
            assert each.delete()


def test_batch_weights(client: gradserve.Client) -> None:
    bn = client.batch_norm()
    forward = bn.forward(X, batch_weights=[1, 0, 0, 0])
    assert forward.implementation is BatchNormImplementation.LEGACY
    close(forward.outputs[0].mean((0, 1)), np.zeros(3))
    of_weights = bn.backward(DY).batch_weights
    assert of_weights is not None
    assert of_weights.shape == (4,)


@pytest.mark.parametrize("shape", [(3,), X.shape, (4, 1, 1, 3)])
def test_an_adjustment(client: gradserve.Client, shape: tuple[int, ...]) -> None:
    bn = client.batch_norm()
    scale, bias = np.full(shape, 2, np.float32), np.full(shape, 1, np.float32)
    forward = bn.forward(X, adjustment=(scale, bias))
    assert forward.implementation is BatchNormImplementation.CORE
    close(forward.outputs, NORMALIZED * 2 + 1)
    gradients = bn.backward(DY)
    assert gradients.adjustment_scale is not None
    assert gradients.adjustment_bias is not None
    assert gradients.adjustment_scale.shape == gradients.adjustment_bias.shape == shape


def test_a_random_adjustment(client: gradserve.Client) -> None:
    bn = client.batch_norm(adjustment=RandomAdjustment(scale=(0.5, 2.0), bias=(-1.0, 1.0), seed=1))
    first, second = (bn.forward(X) for _ in range(2))
    assert first.drawn_adjustment is not None
    assert second.drawn_adjustment is not None
    scale, bias = first.drawn_adjustment
    close(first.outputs, NORMALIZED * scale + bias)
    assert not np.array_equal(scale, second.drawn_adjustment[0])
    of_scale = bn.backward(DY, first).adjustment_scale
    assert of_scale is not None
    assert of_scale.shape == (3,)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 6), (4, 3, 5, 6, 2)])
def test_a_random_adjustment_broadcasts_to_the_outputs(client: gradserve.Client, shape: tuple[int, ...]) -> None:
    bn = client.batch_norm(data_format="NCHW", adjustment=RandomAdjustment(scale=(0.5, 2.0), bias=(-1.0, 1.0)))
    forward = bn.forward(np.random.RandomState(0).standard_normal(shape).astype(np.float32))
    assert forward.drawn_adjustment is not None
    assert [each.shape for each in forward.drawn_adjustment] == [(3, *[1] * (len(shape) - 2))] * 2


@pytest.mark.filterwarnings("ignore::gradserve.IgnoredArgumentWarning")
def test_a_random_adjustment_is_for_training_only(client: gradserve.Client) -> None:
    bn = client.batch_norm(adjustment=RandomAdjustment(scale=(0.5, 2.0), bias=(-1.0, 1.0)), epsilon=0.0)
    forward = bn.forward(X, is_training=False)
    assert forward.drawn_adjustment is None
    close(forward.outputs, X)  # the moving averages are 0 and 1


def test_regularizers(client: gradserve.Client) -> None:
    bn = client.batch_norm(
        scale=True,
        param_initializers={"beta": [1, -2, 3], "gamma": "ones"},
        param_regularizers={"beta": Regularizer("l1", l1=0.5), "gamma": Regularizer("l2", l2=0.1)},
    )
    forward = bn.forward(X)
    assert forward.regularization_losses == pytest.approx({"beta": 3.0, "gamma": 0.15})
    gradients = bn.backward(DY).regularization
    close(gradients["beta"], [0.5, -0.5, 0.5])
    close(gradients["gamma"], [0.1, 0.1, 0.1])


def test_initializers(client: gradserve.Client) -> None:
    bn = client.batch_norm(
        scale=True,
        param_initializers={
            "beta": Initializer("normal", mean=5.0, stddev=0.01, seed=1),
            "gamma": np.arange(3.0),
            "moving_mean": "ones",
        },
        dtype="float32",
        input_shape=(None, 3),
    )
    variables = bn.variables
    assert abs(variables["beta"] - 5).max() < 0.1
    assert variables["gamma"].tolist() == [0, 1, 2]
    assert variables["moving_mean"].tolist() == variables["moving_variance"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, {"beta", "moving_mean", "moving_variance"}),
        ({"center": False, "scale": True}, {"gamma", "moving_mean", "moving_variance"}),
        (
            {"zero_debias_moving_mean": True},
            {"beta", "moving_mean", "moving_variance", "moving_mean/biased", "moving_mean/local_step"},
        ),
        (
            {"renorm": True},
            {"beta", "moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev"},
        ),
        (
            {"renorm": True, "renorm_zero_debias": True},
            {
                *("beta", "moving_mean", "moving_variance", "renorm_mean", "renorm_stddev"),
                *("renorm_mean_weight", "renorm_stddev_weight"),
            },
        ),
    ],
)
def test_variables(client: gradserve.Client, arguments: dict[str, Any], names: set[str]) -> None:
    bn = client.batch_norm(**arguments)
    assert bn.variables == {}
    bn(X)
    assert set(bn.variables) == {each.name for each in bn.describe().variables} == names
    assert set(bn.get_variables("moving_mean")) == {"moving_mean"}
    with pytest.raises(gradserve.NotFoundError, match="delta"):
        bn.get_variables("delta")


def test_arguments_without_effect_are_warned_of(client: gradserve.Client) -> None:
    bn = client.batch_norm(param_regularizers={"beta": Regularizer("l2", l2=0.1)})
    with pytest.warns(gradserve.IgnoredArgumentWarning, match=r"^param_regularizers\[beta\] of batch normalization"):
        forward = bn.forward(X, batch_weights=np.ones(4, np.float32))
    assert [each.argument for each in forward.warnings] == ["param_regularizers[beta]"]
    assert bn.forward(X, batch_weights=np.ones(4, np.float32)).warnings == forward.warnings


def test_a_scope_is_found_again(client: gradserve.Client, name: str) -> None:
    bn = client.batch_norm(decay=0.5, scope=name)
    bn(X)
    for reuse in (None, True):
        same = client.batch_norm(decay=0.5, scope=name, reuse=reuse)
        assert same.variables.keys() == bn.variables.keys()
    with pytest.raises(gradserve.AlreadyExistsError, match="decay"):
        client.batch_norm(decay=0.9, scope=name)
    with pytest.raises(gradserve.AlreadyExistsError):
        client.batch_norm(decay=0.5, scope=name, reuse=False)
    assert same.run_updates() == 0  # those of `bn` are another object's
    assert bn.run_updates() == 1
    assert bn.delete()
    assert not bn.delete()
    with pytest.raises(gradserve.NotFoundError):
        client.batch_norm(decay=0.5, scope=name, reuse=True)


def test_a_layer_created_later_under_the_name_is_another(client: gradserve.Client, name: str) -> None:
    bn = client.batch_norm(scope=name)
    assert bn.delete()
    new = client.batch_norm(scope=name, reuse=False)
    with pytest.raises(gradserve.NotFoundError):
        bn(X)
    assert new.delete()


def test_lists(client: gradserve.Client, name: str) -> None:
    bn = client.batch_norm(scope=f"{name}/a", container=name, variables_collections={"beta": ["tag"]})
    other = client.batch_norm(scope=f"{name}/b", container=name, outputs_collections="out")
    bn(X)

    def listed(**only: str) -> list[str]:
        return [each.name for each in client.list_batch_norm_layers(name, **only)]

    assert listed() == [bn.name, other.name]
    assert listed(scope=f"{name}/b") == listed(collection="out") == [other.name]
    assert listed(collection="tag") == [bn.name]
    assert listed(collection="update_ops") == [bn.name, other.name]
    info = bn.describe()
    assert (info.container, info.name, info.num_forwards, info.num_updates) == (name, bn.name, 1, 0)
    assert info.arguments["variables_collections"] == {"beta": "tag"}
    assert {each.name: each.collections for each in info.variables}["beta"] == ("tag",)
    assert {each.name: each.trainable for each in info.variables} == {
        "beta": True,
        "moving_mean": False,
        "moving_variance": False,
    }
    for each in (bn, other):
        assert each.delete()


def test_a_layer_without_a_scope_ends_with_its_context_or_client(client: gradserve.Client) -> None:
    with gradserve.connect(client.address, timeout=PATIENCE_SECONDS) as other:
        with other.batch_norm() as bn:
            bn(X)
            assert bn.name in {each.name for each in client.list_batch_norm_layers(scope="BatchNorm-")}
        with pytest.raises(gradserve.NotFoundError):
            bn(X)
        left = other.batch_norm()
    assert not {bn.name, left.name} & {each.name for each in client.list_batch_norm_layers(scope="BatchNorm-")}


def test_leaving_a_shared_layer_keeps_it(client: gradserve.Client, name: str) -> None:
    with client.batch_norm(scope=name, updates_collections=None) as bn:
        bn(X)
        assert bn.describe().num_forwards == 1
    assert bn.describe().num_forwards == 0
    assert bn.delete()


def test_leaving_a_shared_layer_frees_memory_and_leaves_updates(client: gradserve.Client, name: str) -> None:
    with client.batch_norm(decay=0.5, scope=name, updates_collections=name) as bn:
        bn.forward(X)
        bn(X)
        assert bn.describe().num_bytes > X.nbytes
    assert bn.describe().num_bytes < X.nbytes
    with pytest.raises(gradserve.InvalidArgumentError):
        bn.backward(DY)
    assert client.run_updates(name) == 2
    assert bn.run_updates() == 0
    close(bn.variables["moving_mean"], 0.75 * MEAN)
    assert bn.delete()


async def test_the_same_with_await(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as client:
        async with await client.batch_norm(decay=0.5, scale=True) as bn:
            close(await bn(X), NORMALIZED)
            gradients = await bn.backward(DY)
            close(gradients.beta, DY.sum(AXES))
            assert await bn.run_updates() == 1
            close((await bn.get_variables())["moving_mean"], 0.5 * MEAN)
            await bn.set_variables({"beta": [1, 2, 3]})
            forward = await bn.forward(LARGE[..., :3].copy(), keep=True)
            assert await bn.release(forward) == 1
        with pytest.raises(gradserve.NotFoundError):
            await bn.describe()
        shared = await client.batch_norm(scope=name)
        assert name in {each.name for each in await client.list_batch_norm_layers()}
        await shared(X)
        assert await client.run_updates() >= 1
        assert await shared.delete()


def test_tags(client: gradserve.Client, name: str) -> None:
    bn = client.batch_norm(
        scope=name, variables_collections={"": "all", "beta": ["mine", "yours"]}, dtype="float32", input_shape=(None, 3)
    )
    assert [each.name for each in bn.describe("mine").variables] == ["beta"]
    assert len(bn.describe("all").variables) == len(bn.describe().variables) == 3
    assert bn.describe("nobody's").variables == ()
    assert [layer.name for layer in client.list_batch_norm_layers(scope=name, collection="yours")] == [name]


def test_tags_of_what_is_no_variable(client: gradserve.Client) -> None:
    with pytest.warns(gradserve.IgnoredArgumentWarning, match=r"variables_collections\[gamma\].* none of .*beta"):
        client.batch_norm(variables_collections={"gamma": "mine"})


def test_descriptions_name_the_shapes_of_initial_values(client: gradserve.Client, name: str) -> None:
    bn = client.batch_norm(scope=name, param_initializers={"beta": np.ones(3, np.float32), "gamma": "ones"}, scale=True)
    (listed,) = client.list_batch_norm_layers(scope=name)
    initializers = listed.arguments["param_initializers"]
    assert initializers == {"beta": gradserve.DenseSpec(np.float32, (3,)), "gamma": gradserve.Initializer("ones")}
    assert bn.describe().arguments["param_initializers"] == initializers
    assert bn.describe().num_bytes == 12
