"""`average_by` in chains of Optax: averages, late workers, joiners, checkpoints."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradserve
from gradserve.jax import AverageByState, average_by
from tests.jax.runs import INITIAL, JaxWorker, adam, gradient, partner, train_step
from tests.servers.polling import PATIENCE_SECONDS

NUM_STEPS = 3


def one_by_one(step: Callable[..., Any], params: Any, opt_state: Any, gradients: list[Any]) -> Any:
    for each in gradients:
        params, opt_state = step(params, opt_state, each)
    return params, opt_state


def in_a_scan(step: Callable[..., Any], params: Any, opt_state: Any, gradients: list[Any]) -> Any:
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *gradients)

    @jax.jit  # type: ignore[untyped-decorator]
    def run(params: Any, opt_state: Any) -> Any:
        return jax.lax.scan(lambda carry, grads: (step(*carry, grads), None), (params, opt_state), stacked)[0]

    return run(params, opt_state)


RUNS: dict[str, Callable[..., Any]] = {
    "compiled": lambda step, *rest: one_by_one(jax.jit(step), *rest),
    "not compiled": one_by_one,
    "in a scan": in_a_scan,
}


@pytest.mark.parametrize("run", list(RUNS.values()), ids=list(RUNS))
def test_is_one_process_on_the_mean_gradient(
    server_address: str, client: gradserve.Client, name: str, run: Callable[..., Any]
) -> None:
    own, other = ([gradient(first + step) for step in range(NUM_STEPS)] for first in (0, 10))
    averaging = average_by(client, num_required=2, name=name)
    with averaging, partner(server_address, name, other):
        optimizer = adam(averaging)
        begun = averaging.begin(INITIAL, optimizer.init(INITIAL))
        params, opt_state = run(train_step(optimizer), *begun, own)
    mean = [jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in zip(own, other, strict=True)]
    alone = optax.adam(0.1)
    expected, _ = run(train_step(alone), INITIAL, alone.init(INITIAL), mean)
    assert opt_state[0] == AverageByState(jnp.asarray(NUM_STEPS))
    assert jax.tree.structure(params) == jax.tree.structure(INITIAL)
    for actual, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6)


def test_the_parameters_of_the_first_worker_are_everybody_s(client: gradserve.Client, name: str) -> None:
    JaxWorker(client, name).begin()
    second = JaxWorker(client, name)
    second.params = jax.tree.map(lambda each: each + 1, second.params)
    assert second.begin().at == JaxWorker(client, name).at


def test_a_late_worker_applies_a_missed_average_with_each_update(client: gradserve.Client, name: str) -> None:
    early, late = (JaxWorker(client, name).begin() for _ in range(2))
    passed = [early.update(seed).at for seed in range(NUM_STEPS)]
    assert [late.update(seed=100 + each).at for each in range(NUM_STEPS)] == passed
    assert late.update(seed=7).at == early.update(seed=8).at, "the gradient of who was in time counts"


def test_a_late_worker_catches_up_at_once(client: gradserve.Client, name: str) -> None:
    early, late = (JaxWorker(client, name).begin() for _ in range(2))
    for seed in range(NUM_STEPS):
        early.update(seed)
    assert late.update(seed=100).catch_up().at == early.at
    assert early.update(seed=7).at[0] == NUM_STEPS + 1


def test_a_worker_that_is_later_than_averages_are_kept_gets_a_state(client: gradserve.Client, name: str) -> None:
    late = JaxWorker(client, name, keep_averages=1).begin()
    early = JaxWorker(client, name, keep_averages=1).begin()
    with early.averaging:
        for seed in range(NUM_STEPS):
            early.update(seed).catch_up()
    late.update(seed=100)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no longer kept.*catch_up"):
        late.step(late.params, late.opt_state, gradient(0))
    assert late.catch_up().at == early.at
    assert late.update(seed=5).at[0] == NUM_STEPS + 1


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_a_joiner_gets_parameters_optimizer_and_step(
    server_address: str, client: gradserve.Client, name: str, donate: bool
) -> None:
    """Workers whose buffers belong to the compiled step answer, too: a step later."""
    first = JaxWorker(client, name, donate=donate, num_required=1).begin()
    passed = {}
    joined: list[JaxWorker] = []

    def join() -> None:
        with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as another:
            joined.append(JaxWorker(another, name, num_required=1).begin())
            joined[0].averaging.close()

    first.update(0).catch_up()
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join)
        while not joining.done():
            passed[first.at[0]] = first.at[1]
            first.update(seed=first.at[0]).catch_up()
        joining.result()
    step, numbers = joined[0].at
    assert step >= 1
    assert numbers == passed[step]


def test_a_checkpoint_goes_on_where_it_was(client: gradserve.Client, name: str) -> None:
    first = JaxWorker(client, name).begin()
    first.update(0)
    saved = jax.tree.map(np.asarray, (first.params, first.opt_state))
    first.update(1).update(2)
    again = JaxWorker(client, name)
    again.params, again.opt_state = saved
    assert again.begin().at[0] == 1
    assert again.update(seed=100).catch_up().at == first.at


def test_pytrees_of_every_kind(client: gradserve.Client, name: str) -> None:
    trees = {
        "named tuple": AverageByState(jnp.ones(2)),
        "one leaf": jnp.ones(3),
        "tuples": (jnp.ones(1), [None, {"x/y": jnp.zeros(2)}]),
        "bfloat16 and float32": {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)},
        "empty": {"a": jnp.ones((0, 3)), "b": jnp.ones(())},
    }
    for kind, tree in trees.items():
        averaging = average_by(client, num_required=1, name=f"{name}/{kind}")
        optimizer = optax.chain(averaging, optax.sgd(1.0))
        _, opt_state = averaging.begin(tree, optimizer.init(tree))
        updates, _ = jax.jit(optimizer.update)(tree, opt_state)
        assert jax.tree.structure(updates) == jax.tree.structure(tree), kind
        for actual, given in zip(jax.tree.leaves(updates), jax.tree.leaves(tree), strict=True):
            assert actual.dtype == given.dtype
            np.testing.assert_array_equal(np.float32(actual), -np.float32(given))


def test_random_keys_and_numbers_travel_to_joiners(client: gradserve.Client, name: str) -> None:
    def noisy(seed: int) -> tuple[Any, Any]:
        averaging = average_by(client, num_required=1, name=name)
        optimizer = optax.chain(averaging, optax.add_noise(0.1, 0.5, seed), optax.scale(-1.0))
        opt_state = (*optimizer.init(INITIAL), {"python": seed, "key": jax.random.key(seed)})
        _, begun = averaging.begin(INITIAL, opt_state)
        return begun[1], begun[3]

    first, second = noisy(1), noisy(2)
    for actual, wanted in zip(jax.tree.leaves(second), jax.tree.leaves(first), strict=True):
        assert type(actual) is type(wanted)
        assert (actual == wanted).all() if isinstance(actual, jax.Array) else actual == wanted


def test_gradients_that_are_not_finite(client: gradserve.Client, name: str) -> None:
    worker = JaxWorker(client, name, container="other", idle_lease=3600.0, durability="none").begin()
    grads = {"w": jnp.asarray([1.0, jnp.nan, 1.0]), "layers": [{"b": jnp.asarray(0.5)}, None]}
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected finite values for component 'w', got nan at"):
        jax.block_until_ready(worker.step(worker.params, worker.opt_state, grads))
    assert worker.update(0).catch_up().at[0] == 1  # the other gradient of the same step
    (info,) = [each for each in client.list_accumulators("other") if each.name == name]
    assert info.idle_lease == 3600.0
    loose = JaxWorker(client, f"{name}-loose", refuse_non_finite=False).begin()
    loose.params, loose.opt_state = loose.step(loose.params, loose.opt_state, grads)
    assert loose.at[0] == 1


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "given away"])
def test_parameters_that_have_come_to_differ(client: gradserve.Client, name: str, donate: bool) -> None:
    workers = [JaxWorker(client, name, donate=donate, num_required=2, compare_every=1) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(JaxWorker.begin, workers))

        def step(seed: int) -> list[BaseException | None]:
            updates = [threads.submit(lambda each: each.update(seed).catch_up(), each) for each in workers]
            return [each.exception() for each in updates]

        assert [step(seed) for seed in range(2)] == [[None, None]] * 2
        assert workers[0].at == workers[1].at
        workers[1].params = jax.tree.map(lambda each: each + 1e-3, workers[1].params)
        workers[1].catch_up()
        failures = [each for each in step(2) if each is not None]
        assert len(failures) == 1
        assert "other parameters than most of its 2 workers; equal at step 1" in str(failures[0])
