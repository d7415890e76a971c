"""Trains JAX models together with other workers, and computes gradient ops on a server.

Where the server holds the parameters, a worker is a loop. One that comes later, or was too late, goes on from the
newest version like all others:

parameters = client.parameters(leaves_of(params), shared_name="net", num_required=4)
version = parameters.read()
while version.step < 1000:
    params = train_some_steps(load_version(params, version))
    version = parameters.push_pull(delta_of(params, version), version).version

Where each worker has an optimizer of its own, `average_by` averages what its steps take:

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
from gradserve.jax.training_state import AverageByState
from gradserve.jax.transformation import AverageBy, average_by
from gradserve.public_names import publish as _publish

__all__ = ["AverageBy", "AverageByState", "average_by", "delta_of", "functions", "leaves_of", "load_version"]

_publish(__name__, globals(), __all__)
