"""Pytrees of JAX whose leaves a server holds as parameters."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradserve
from gradserve import optim
from gradserve.jax import delta_of, leaves_of, load_version

STEPS = 5


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A node of a class of its own, as Flax and Equinox have."""

    w: jax.Array
    b: jax.Array | None


def params_of(seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "layers": [
            Layer(jax.random.normal(keys[0], (3, 4), dtype), jnp.zeros(4, dtype)),
            Layer(jax.random.normal(keys[1], (4, 2), dtype), None),
        ],
        "scale": jax.random.normal(keys[2], (), dtype),
    }


NAMES = ["layers/0/w", "layers/0/b", "layers/1/w", "scale"]


@jax.jit  # type: ignore[untyped-decorator]
def loss_of(params: Any, inputs: jax.Array) -> jax.Array:
    first, second = params["layers"]
    return jnp.mean(jnp.square(params["scale"] * (jnp.tanh(inputs @ first.w + first.b) @ second.w) - 1))


def batch(worker: int, step: int) -> jax.Array:
    return jax.random.normal(jax.random.key(100 * worker + step), (8, 3))


def as_lists(tree: Any) -> dict[str, Any]:
    return {name: np.asarray(each).tolist() for name, each in leaves_of(tree).items()}


def test_pytrees_of_any_class(client: gradserve.Client, name: str) -> None:
    params = params_of(1)
    assert list(leaves_of(params)) == NAMES
    version = client.parameters(leaves_of(params), shared_name=name).read()
    loaded = load_version(params_of(2), version)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert as_lists(loaded) == as_lists(params)
    assert all(not each.any() for each in delta_of(loaded, version).values())


def test_plain_trees_need_no_help(client: gradserve.Client, name: str) -> None:
    params = {"layers": [{"w": jnp.ones((2, 3))}], "b": jnp.zeros(3)}
    parameters = client.parameters(params, shared_name=name, update="gradient", optimizer=optim.SGD(0.5))
    version = parameters.read()
    grads = jax.grad(lambda tree: jnp.sum(tree["layers"][0]["w"] ** 2) + jnp.sum(tree["b"]))(version.values)
    version = parameters.push_pull(grads, version).version
    assert version.values["layers"][0]["w"].tolist() == [[0.0] * 3] * 2
    assert version.values["b"].tolist() == [-0.5] * 3


def test_gradients_do_as_the_optimizer_of_optax(client: gradserve.Client, name: str) -> None:
    params = alone = params_of(1)
    optimizer = optax.adam(0.01)
    state = optimizer.init(alone)
    parameters = client.parameters(
        leaves_of(params), shared_name=name, update="gradient", optimizer=optim.Adam(0.01), num_required=2
    )
    for step in range(STEPS):
        grads = [jax.grad(loss_of)(params, batch(worker, step)) for worker in range(2)]
        parameters.push(leaves_of(grads[0]), step, worker_id="0")
        params = load_version(params, parameters.push_pull(leaves_of(grads[1]), step, worker_id="1").version)
        grads = [jax.grad(loss_of)(alone, batch(worker, step)) for worker in range(2)]
        updates, state = optimizer.update(jax.tree.map(lambda a, b: (a + b) / 2, *grads), state)
        alone = optax.apply_updates(alone, updates)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_deltas_of_local_steps(client: gradserve.Client, name: str) -> None:
    """SGD of rate one makes the weighted mean of the locals; a worker that comes later begins there."""
    params = [params_of(seed) for seed in (1, 2)]
    parameters = client.parameters(leaves_of(params[0]), shared_name=name, num_required=2)
    version = parameters.read()
    for worker in range(2):
        params[worker] = load_version(params[worker], version)
        for step in range(STEPS):
            grads = jax.grad(loss_of)(params[worker], batch(worker, step))
            params[worker] = jax.tree.map(lambda value, grad: value - 0.1 * grad, params[worker], grads)
        parameters.push(delta_of(params[worker], version), version, weight=worker + 1, worker_id=str(worker))
    late = load_version(params_of(3), client.parameters(leaves_of(params_of(3)), shared_name=name).read(1))
    mean = jax.tree.map(lambda one, other: (one + 2 * other) / 3, *params)
    for found, expected in zip(jax.tree.leaves(late), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_pytree_of_a_shorter_dtype_moves_by_what_it_learnt_alone(client: gradserve.Client, name: str) -> None:
    version = client.parameters(leaves_of(params_of(1)), shared_name=name).read()
    params = load_version(params_of(2, jnp.bfloat16), version)
    assert {each.dtype for each in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert all(not each.any() for each in delta_of(params, version).values())


def test_values_stay_on_their_devices(client: gradserve.Client, name: str) -> None:
    device = jax.devices()[-1]
    params = jax.device_put(params_of(1), device)
    version = client.parameters(leaves_of(params), shared_name=name).read(copy=False)
    for leaf in (*jax.tree.leaves(load_version(params, version)), *delta_of(params, version).values()):
        assert leaf.devices() == {device}


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"w": jnp.ones(4), "b": jnp.ones(2)}, r"expected shape \(4,\) of 'w', got \(3,\)"),
        ({"w": jnp.ones(3)}, "expected values of the model's parameters alone, got 'b'"),
        ({"v": jnp.ones(3), "b": jnp.ones(2)}, "expected values of 'v', got none, but 'w'"),
    ],
)
def test_the_version_of_another_model(client: gradserve.Client, name: str, params: Any, match: str) -> None:
    version = client.parameters({"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, shared_name=name).read()
    for use in (load_version, delta_of):
        with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
            use(params, version)
        assert raised.value.field == "version"
