"""DiLoCo for JAX: parameters that are trained by themselves and synchronize through a server."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradserve
from gradserve import optim
from gradserve.data import sampler
from gradserve.jax import diloco
from tests.servers.polling import PATIENCE_SECONDS

SYNC_EVERY = 4
ROUNDS = 5
WEIGHTS = [1.0, 3.0]


@pytest.fixture
def clients(server_address: str) -> Iterator[list[gradserve.Client]]:
    with gradserve.connect(server_address) as one, gradserve.connect(server_address) as other:
        yield [one, other]


def together(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as threads:
        return [each.result(PATIENCE_SECONDS) for each in [threads.submit(work) for work in works]]


def params_of(seed: int) -> Any:
    first, second = jax.random.split(jax.random.key(seed))
    return {"layers": [jax.random.normal(first, (3, 4)), jax.random.normal(second, (4, 2))], "scale": jnp.ones(())}


@jax.jit  # type: ignore[untyped-decorator]
def gradients_of(params: Any, inputs: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        first, second = params["layers"]
        return jnp.mean(jnp.square(params["scale"] * (jnp.tanh(inputs @ first) @ second) - 1))

    return jax.grad(loss)(params)


def batch(worker: int, step: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1000 * worker + step), (8, 3))


class Inner:
    """A worker's inner optimizer, in a compiled step that gives its arguments away."""

    def __init__(self, params: Any) -> None:
        self.optimizer = optax.adam(0.01)
        self.state = self.optimizer.init(params)
        self._step = jax.jit(self._compiled, donate_argnums=(0, 1))

    def _compiled(self, params: Any, state: Any, inputs: jax.Array) -> Any:
        updates, state = self.optimizer.update(gradients_of(params, inputs), state)
        return optax.apply_updates(params, updates), state

    def step(self, params: Any, inputs: jax.Array) -> Any:
        params, self.state = self._step(params, self.state, inputs)
        return params


def in_one_process() -> Any:
    common = params_of(1)
    inner = [Inner(common) for _ in WEIGHTS]
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    state = outer.init(common)
    for number in range(ROUNDS):
        deltas = []
        for worker, each in enumerate(inner):
            params = jax.tree.map(jnp.copy, common)
            for step in range(number * SYNC_EVERY, (number + 1) * SYNC_EVERY):
                params = each.step(params, batch(worker, step))
            deltas.append(jax.tree.map(jnp.subtract, common, params))
        mean = jax.tree.map(
            lambda *each: sum(w * d for w, d in zip(WEIGHTS, each, strict=True)) / sum(WEIGHTS), *deltas
        )
        updates, state = outer.update(mean, state)
        common = optax.apply_updates(common, updates)
    return common


@pytest.mark.parametrize("fragments", [None, 1], ids=["whole", "one fragment"])
def test_it_is_diloco(clients: list[gradserve.Client], name: str, fragments: int | None) -> None:
    def work(rank: int) -> Any:
        run = diloco(
            clients[rank],
            sync_every=SYNC_EVERY,
            name=name,
            num_required=2,
            weight=lambda _tokens, _steps: WEIGHTS[rank],
            fragments=fragments,
        )
        with run:
            params = run.init(params_of(1))
            inner = Inner(params)
            for step in range(ROUNDS * SYNC_EVERY):
                params = run.sync(inner.step(params, batch(rank, step)))
            assert (run.step, run.version) == (ROUNDS * SYNC_EVERY, ROUNDS)
        return params

    found = together(partial(work, 0), partial(work, 1))
    assert jax.tree.structure(found[0]) == jax.tree.structure(params_of(1))
    for one, other, expected in zip(*map(jax.tree.leaves, (*found, in_one_process())), strict=True):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


def walk(run: Any, params: Any, steps: int, speed: float = 1.0) -> Any:
    for _ in range(steps):
        params = run.sync(jax.tree.map(lambda each: each + speed, params))
    return params


def local_sgd(client: gradserve.Client, name: str, **options: Any) -> Any:
    given: dict[str, Any] = {"sync_every": 2, "num_required": 1, "outer": optim.SGD(1.0), **options}
    return diloco(client, name=name, **given)


def test_joining_fragments_and_the_end(clients: list[gradserve.Client], name: str) -> None:
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3, jnp.bfloat16)}
    with local_sgd(clients[0], name, fragments=[["a"], ["b"]]) as run:
        params = walk(run, run.init(params), 5)
        params = run.sync(params, now=True)
    assert [each.tolist() for each in jax.tree.leaves(params)] == [[5.0] * 2, [5.0] * 3]
    with local_sgd(clients[1], name, fragments=[["a"], ["b"]]) as run:
        joined = run.init({"a": jnp.full(2, -7.0), "b": jnp.ones(3, jnp.bfloat16)})
        assert [each.tolist() for each in jax.tree.leaves(joined)] == [[5.0] * 2, [5.0] * 3]
        assert joined["b"].dtype == jnp.bfloat16
        assert run.version == 3


def test_a_delay(clients: list[gradserve.Client], name: str) -> None:
    with local_sgd(clients[0], name, sync_every=4, fragment_sync_delay=2) as run:
        params = walk(run, run.init({"a": jnp.zeros(1)}), 3)
        assert float(params["a"][0]) == 3.0
        assert float(run.finish(params)["a"][0]) == 2.0


def test_failures_and_tokens(clients: list[gradserve.Client], name: str) -> None:
    with local_sgd(clients[0], name, num_required=2, timeout=0.1, weight="tokens") as run:
        params = run.init({"a": jnp.zeros(1)})
        run.count(tokens=7)
        params = walk(run, params, 3)
        assert (float(params["a"][0]), run.num_failed) == (3.0, 1)
    assert clients[1].parameters(shared_name=name).info().weights.pending == 7


def test_a_fragment_that_the_server_refuses(client: gradserve.Client, name: str) -> None:
    """The values of the other fragment, which was synchronized, come with the next synchronization."""

    def step(a: float, b: float) -> Any:
        return run.sync(run.sync({"a": jnp.full(1, a), "b": jnp.full(1, b)}), now=True)

    with local_sgd(client, name, sync_every=4, fragments=[["a"], ["b"]], outer=optim.SGD(0.5)) as run:
        run.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
        with pytest.raises(gradserve.InvalidArgumentError, match="finite"):
            step(2.0, np.nan)
        params = step(2.0 + 1.0, 1.0)
    assert (float(params["a"][0]), float(params["b"][0])) == (2.0 / 2 + 1.0 / 2, 1.0 / 2)


def test_workers_that_share_the_data_out(clients: list[gradserve.Client], name: str) -> None:
    """Each sample is in one update that counts: twice in two epochs of 12 samples."""

    def work(rank: int) -> list[int]:
        data = sampler(12, seed=1, batch_size=1, batches_per_step=2)
        taken: list[int] = []
        with local_sgd(clients[rank], name, num_required=2, data=data) as run:
            params = run.init({"a": jnp.zeros(1)})
            while data.epoch < 2:
                for batch in data:
                    taken += batch
                    params = walk(run, params, 1)
        return taken

    one, other = together(partial(work, 0), partial(work, 1))
    assert sorted([*one, *other]) == sorted([*range(12), *range(12)])


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"outer": optax.sgd(1.0)}, "outer"),
        ({"fragment_update_alpha": -1}, "fragment_update_alpha"),
        ({"fragments": 5}, "fragments"),
        ({"fragments": [["c"]]}, "fragments"),
        ({"fragments": 2, "data": sampler(9, seed=0, batch_size=1, batches_per_step=2)}, "fragments"),
        ({"on_failure": "continue", "data": sampler(9, seed=0, batch_size=1, batches_per_step=2)}, "on_failure"),
    ],
)
def test_bad_arguments(client: gradserve.Client, name: str, wrong: Any, field: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as failure, local_sgd(client, name, **wrong) as run:
        run.init({"a": jnp.zeros(1), "b": jnp.zeros(2)})
    assert failure.value.field == field


def test_before_it_has_begun(client: gradserve.Client, name: str) -> None:
    with local_sgd(client, name) as run, pytest.raises(RuntimeError, match=r"call params = diloco.init\(params\)"):
        run.sync({"a": jnp.zeros(1)})
