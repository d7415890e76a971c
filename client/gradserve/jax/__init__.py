"""Trains JAX models together with other workers, and computes gradient ops on a server.

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
from gradserve.jax.training_state import AverageByState
from gradserve.jax.transformation import AverageBy, average_by
from gradserve.public_names import publish as _publish

__all__ = ["AverageBy", "AverageByState", "average_by", "functions"]

_publish(__name__, globals(), __all__)
