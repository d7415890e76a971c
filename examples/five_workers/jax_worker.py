"""One worker with JAX of a training run whose parameters the server holds; the others may be in any language."""

import jax
import jax.numpy as jnp
import optax
from messages import make_messages, options, report, rules, zeros

import gradserve

told = options("jax")
counts, is_unwanted = make_messages(told.worker, told.words)


@jax.jit
@jax.grad
def gradient_of(params: dict[str, jax.Array]) -> jax.Array:
    """Returns the gradient of the mean cross-entropy of the messages."""
    return optax.sigmoid_binary_cross_entropy(
        jnp.asarray(counts) @ params["weights"] + params["bias"], is_unwanted
    ).mean()


with gradserve.connect(told.address, timeout=60) as client:
    parameters = client.parameters(zeros(told.words), shared_name=told.run, **rules(told.required))
    version = parameters.read()
    print(f"{told.worker}: begins at step {version.step}", flush=True)
    num_counted = 0
    while version.step < told.steps:
        pushed = parameters.push_pull(gradient_of(version.values), version, worker_id=told.worker)
        num_counted += pushed.outcome is not gradserve.STALE
        version = pushed.version
report(told, version, num_counted)
