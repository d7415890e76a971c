"""Trains with JAX; its pytree is a dict with the names that the parameters have in PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import NUM_STEPS, NUM_WORKERS, RATE, Task, new_weights, share

import gradserve
import gradserve.jax


def train(task: Task) -> dict[str, jax.Array]:
    """Trains together with the other workers."""
    images, labels = map(jnp.asarray, share(task.share))

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(images @ params["0.weight"].T + params["0.bias"])
        logits = hidden @ params["2.weight"].T + params["2.bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    with (
        gradserve.connect(task.address, timeout=60) as client,
        gradserve.jax.average_by(client, num_required=NUM_WORKERS, name=task.name) as averaging,
    ):
        optimizer = optax.chain(averaging, optax.sgd(RATE))

        @jax.jit
        def train_step(params: Any, opt_state: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        params = jax.tree.map(jnp.asarray, new_weights())
        params, opt_state = averaging.begin(params, optimizer.init(params))
        while averaging.step < NUM_STEPS:
            params, opt_state, loss = train_step(params, opt_state)
            params, opt_state = averaging.catch_up(optimizer, params, opt_state)
    print(f"JAX: loss {loss:.4f} on its own digits")
    return params


if __name__ == "__main__":
    told = Task.from_command_line()
    told.save_weights(jax.tree.map(np.asarray, train(told)))
