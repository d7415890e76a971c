"""Small training runs with JAX workers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradserve
from gradserve.jax import AverageBy, average_by
from gradserve.training import Worker
from tests.servers.polling import PATIENCE_SECONDS

INITIAL = {"w": jnp.asarray([1.0, -2.0, 3.0]), "layers": [{"b": jnp.asarray(0.5)}, None]}
"""Parameters of a model: "w" and "layers/0/b"."""


def gradient(seed: int) -> Any:
    """Returns gradients of INITIAL that differ with the seed."""
    return jax.tree.map(lambda each: jnp.cos(seed + 0.7 * jnp.arange(each.size)).reshape(each.shape), INITIAL)


def adam(averaging: AverageBy) -> Any:
    return optax.chain(averaging, optax.adam(0.1))


def train_step(optimizer: Any) -> Callable[..., Any]:
    """Returns a step that is not compiled."""

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


class JaxWorker:
    """A worker with Adam."""

    def __init__(self, client: gradserve.Client, name: str, *, donate: bool = False, **options: Any) -> None:
        self.averaging = average_by(client, name=name, **{"num_required": 1, **options})
        self.optimizer = adam(self.averaging)
        self.step = jax.jit(train_step(self.optimizer), donate_argnums=(0, 1) if donate else ())
        self.params = jax.tree.map(jnp.copy, INITIAL)
        self.opt_state = self.optimizer.init(self.params)

    def begin(self, **options: Any) -> "JaxWorker":
        self.params, self.opt_state = self.averaging.begin(self.params, self.opt_state, **options)
        return self

    def update(self, seed: int) -> "JaxWorker":
        self.params, self.opt_state = self.step(self.params, self.opt_state, gradient(seed))
        return self

    def catch_up(self) -> "JaxWorker":
        self.params, self.opt_state = self.averaging.catch_up(self.optimizer, self.params, self.opt_state)
        return self

    @property
    def at(self) -> tuple[int, list[list[float]]]:
        """The step, and every number of the parameters and the optimizer."""
        leaves = jax.tree.leaves((self.params, self.opt_state[1:]))
        return int(self.opt_state[0].step), [np.ravel(each).tolist() for each in leaves]


@contextmanager
def partner(address: str, name: str, gradients: list[Any], **options: Any) -> Iterator[None]:
    """Another worker, which is not JAX's, in another thread: it sends these gradients, one a step."""
    parameters = {"w": np.zeros(3, np.float32), "layers/0/b": np.zeros((), np.float32)}
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with (
                gradserve.connect(address, timeout=PATIENCE_SECONDS) as client,
                Worker(client, parameters, name=name, **{"num_required": 2, **options}) as worker,
            ):
                worker.begin(lambda: None, start_step=0)
                for each in gradients:
                    worker.exchange({"w": each["w"], "layers/0/b": each["layers"][0]["b"]})
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failures, failures
