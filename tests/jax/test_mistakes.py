"""A user's first mistakes: each ends with an error that says what to do."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import gradserve
from gradserve.jax import average_by
from tests.jax.runs import INITIAL, JaxWorker, gradient

Mistake = Callable[[gradserve.Client, str], Any]


def update_before_begin(client: gradserve.Client, name: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    averaging.update(gradient(0), averaging.init(INITIAL))


def begin_twice(client: gradserve.Client, name: str) -> None:
    JaxWorker(client, name).begin().begin()


def another_model(client: gradserve.Client, name: str) -> None:
    JaxWorker(client, name).begin()
    averaging = average_by(client, num_required=1, name=name)
    averaging.begin({"w": jnp.zeros(4)}, averaging.init(None))


def another_number_of_workers(client: gradserve.Client, name: str) -> None:
    JaxWorker(client, name).begin()
    JaxWorker(client, name, num_required=2).begin()


def another_optimizer(client: gradserve.Client, name: str) -> None:
    JaxWorker(client, name).begin()
    averaging = average_by(client, num_required=1, name=name)
    averaging.begin(INITIAL, optax.chain(averaging, optax.sgd(0.1)).init(INITIAL))


def another_learning_rate(client: gradserve.Client, name: str) -> None:
    for rate in (0.5, 0.25):
        averaging = average_by(client, num_required=1, name=name)
        optimizer = optax.chain(averaging, optax.inject_hyperparams(optax.sgd)(learning_rate=rate))
        averaging.begin(INITIAL, optimizer.init(INITIAL))


def other_settings(client: gradserve.Client, name: str) -> None:
    for schedule in ("cosine", "linear"):
        JaxWorker(client, name, settings={"schedule": schedule}).begin()


def state_of_another_optimizer(client: gradserve.Client, name: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    averaging.begin(INITIAL, optax.adam(0.1).init(INITIAL))


def two_in_one_chain(client: gradserve.Client, name: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    averaging.begin(INITIAL, optax.chain(averaging, averaging).init(INITIAL))


def integers(client: gradserve.Client, name: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    averaging.begin({"w": jnp.zeros(2), "table": jnp.zeros(2, jnp.int32)}, averaging.init(None))


def text(client: gradserve.Client, name: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    averaging.begin({"w": jnp.zeros(2)}, (averaging.init(None), "adam"))


def equal_names(client: gradserve.Client, name: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    averaging.begin({"a": {"b": jnp.zeros(2)}, "a/b": jnp.zeros(2)}, averaging.init(None))


def updated_twice(client: gradserve.Client, name: str) -> None:
    worker = JaxWorker(client, name).begin()
    for _ in range(2):
        worker.averaging.update(gradient(0), worker.opt_state[0])


def started_again_without_joining(client: gradserve.Client, name: str) -> None:
    JaxWorker(client, name).begin().update(0)
    JaxWorker(client, name, if_exists="error").begin()


def no_gradient(client: gradserve.Client, name: str) -> None:
    worker = JaxWorker(client, name).begin()
    worker.averaging.update({"w": gradient(0)["w"], "layers": None}, worker.opt_state[0])


def another_dtype(client: gradserve.Client, name: str) -> None:
    worker = JaxWorker(client, name).begin()
    grads = jax.tree.map(lambda each: each.astype(jnp.bfloat16), gradient(0))
    worker.averaging.update(grads, worker.opt_state[0])


def nobody_else_comes(client: gradserve.Client, name: str) -> None:
    worker = JaxWorker(client, name, num_required=2, timeout=0.1).begin()
    worker.averaging.update(gradient(0), worker.opt_state[0])


def others_are_gone(client: gradserve.Client, name: str) -> None:
    JaxWorker(client, name).begin().update(0)
    JaxWorker(client, name, timeout=0.1).begin()


MISTAKES: dict[Mistake, tuple[type[Exception], str]] = {
    update_before_begin: (
        gradserve.InvalidArgumentError,
        "expected begin before the first update: params, opt_state = ",
    ),
    begin_twice: (gradserve.InvalidArgumentError, "make another average_by"),
    another_model: (gradserve.AlreadyExistsError, "need the same parameters"),
    another_number_of_workers: (gradserve.AlreadyExistsError, "the same num_required"),
    another_optimizer: (
        gradserve.AlreadyExistsError,
        r"optimizer is .*ScaleByAdamState.* there and \(AverageByState,.* here",
    ),
    another_learning_rate: (gradserve.AlreadyExistsError, "learning_rate of the optimizer is 0.5 there and 0.25 here"),
    other_settings: (gradserve.AlreadyExistsError, "schedule is cosine there and linear here"),
    state_of_another_optimizer: (gradserve.InvalidArgumentError, "one with 0; make it with optimizer.init"),
    two_in_one_chain: (gradserve.InvalidArgumentError, "with one average_by for opt_state, got one with 2"),
    integers: (
        gradserve.InvalidArgumentError,
        "got int32 for 'table'; give begin and optimizer.init only what is trained",
    ),
    text: (gradserve.InvalidArgumentError, "got str for 'optimizer/1'; keep it out of the tree"),
    equal_names: (gradserve.InvalidArgumentError, "two named 'a/b'"),
    updated_twice: (gradserve.InvalidArgumentError, "state of the optimizer of step 1, got that of step 0"),
    started_again_without_joining: (gradserve.AlreadyExistsError, 'is at step 1.*if_exists="join"'),
    no_gradient: (gradserve.InvalidArgumentError, r"got none of \['layers/0/b'\] and one of \[\]; pass zeros"),
    another_dtype: (
        gradserve.InvalidArgumentError,
        "in float32, the dtype of the parameter, got bfloat16; jax.tree.map",
    ),
    nobody_else_comes: (gradserve.DeadlineExceededError, "the 2 gradients required"),
    others_are_gone: (gradserve.DeadlineExceededError, "go on from a checkpoint"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES), ids=lambda mistake: mistake.__name__)
def test_says_what_to_do(client: gradserve.Client, name: str, mistake: Mistake) -> None:
    expected, message = MISTAKES[mistake]
    with pytest.raises(expected) as raised:
        mistake(client, name)
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert re.search(message, said, re.DOTALL), said


def test_compiled_steps_say_it_too(client: gradserve.Client, name: str) -> None:
    worker = JaxWorker(client, name, num_required=2, timeout=0.1).begin()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"DeadlineExceededError: .*the 2 gradients required"):
        worker.update(0)


def test_vmap_is_refused(client: gradserve.Client, name: str) -> None:
    worker = JaxWorker(client, name).begin()
    with pytest.raises(ValueError, match="vmap"):
        jax.vmap(lambda grads: worker.averaging.update(grads, worker.opt_state[0])[0])(
            jax.tree.map(lambda each: jnp.stack([each, each]), gradient(0))
        )


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "MultiSteps": lambda inner: optax.MultiSteps(inner, every_k_schedule=2),
    "masked": lambda inner: optax.masked(inner, {"w": True, "layers": False}),
    "multi_transform": lambda inner: optax.multi_transform(
        {"a": inner, "b": optax.sgd(0.1)}, {"w": "a", "layers": [{"b": "b"}, None]}
    ),
    "conditionally_transform": lambda inner: optax.conditionally_transform(inner, lambda step: step % 2 == 0),
    "conditionally_mask": lambda inner: optax.conditionally_mask(inner, lambda step: step % 2 == 0),
    "contrib.sam": lambda inner: optax.contrib.sam(inner, optax.sgd(0.1)),
    "contrib.reduce_on_plateau": lambda inner: optax.chain(inner, optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_transformations_that_it_cannot_be_in(client: gradserve.Client, name: str, wrapper: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    optimizer = WRAPPERS[wrapper](optax.chain(averaging, optax.sgd(0.1)))
    with pytest.raises(gradserve.InvalidArgumentError, match=rf"optax\.{re.escape(wrapper)}\b"):
        averaging.begin(INITIAL, optimizer.init(INITIAL))
    assert name not in {each.name for each in client.list_accumulators()}


@pytest.mark.parametrize("wrapper", ["MultiSteps", "masked", "multi_transform"])
def test_it_can_be_before_them(client: gradserve.Client, name: str, wrapper: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    optimizer = optax.chain(averaging, WRAPPERS[wrapper](optax.sgd(0.1)))
    params, opt_state = averaging.begin(INITIAL, optimizer.init(INITIAL))
    for _ in range(2):
        updates, opt_state = optimizer.update(gradient(0), opt_state, params)
        params = optax.apply_updates(params, updates)
        params, opt_state = averaging.catch_up(optimizer, params, opt_state)
    assert averaging.step == 2
    assert not jnp.array_equal(params["w"], INITIAL["w"])


def test_one_that_reshapes_parameters(client: gradserve.Client, name: str) -> None:
    averaging = average_by(client, num_required=1, name=name)
    optimizer = optax.flatten(optax.chain(averaging, optax.sgd(0.1)))
    params, opt_state = averaging.begin(INITIAL, optimizer.init(INITIAL))
    with pytest.raises(gradserve.InvalidArgumentError, match=r"such as optax\.flatten, put it before that"):
        optimizer.update(gradient(0), opt_state, params)
