"""Trains JAX models together with other workers, and computes gradient ops on a server.

With `diloco`, workers train by themselves, and synchronize every so many steps. The server holds the parameters:

with gradserve.jax.diloco(client, sync_every=100, name="llm", num_required=4) as diloco:
    params = diloco.init(params)
    for batch in batches:
        params, opt_state = train_step(params, opt_state, batch)
        params = diloco.sync(params)

With `average_by`, workers average the gradients of every step:

averaging = gradserve.jax.average_by(client, num_required=4, name="digits")
optimizer = optax.chain(averaging, optax.adam(1e-3))
params, opt_state = averaging.begin(params, optimizer.init(params))
for batch in batches:
    params, opt_state = train_step(params, opt_state, batch)  # compiled or not
    params, opt_state = averaging.catch_up(optimizer, params, opt_state)

Needs JAX and Optax: `pip install '.[jax]'` in a checkout of gradserve.
"""

from gradserve_protocol.extras import require_frameworks

require_frameworks("gradserve.jax", "jax", jax="JAX", optax="Optax")

from gradserve.jax import functions
from gradserve.jax.leaves import delta_of, leaves_of, load_version
from gradserve.jax.local_training import DiLoCo, diloco
from gradserve.jax.training_state import AverageByState
from gradserve.jax.transformation import AverageBy, average_by
from gradserve.public_names import publish as _publish

__all__ = [
    "AverageBy",
    "AverageByState",
    "DiLoCo",
    "average_by",
    "delta_of",
    "diloco",
    "functions",
    "leaves_of",
    "load_version",
]

_publish(__name__, globals(), __all__)
