"""Training together: what each worker does, whatever framework computes its gradients.

A `Worker` has parameters and an optimizer of its own. Where the server holds the parameters (`Client.parameters`), no
Worker is needed: to begin, to join late and to catch up are all `Parameters.read`.

import gradserve
from gradserve.training import State, Worker

with gradserve.connect("localhost:50051") as client, Worker(client, weights, name="net", num_required=3) as worker:
    state = worker.begin(lambda: State(weights))
    if state is not None:
        weights = dict(state.tensors)
    for batch in batches:
        advance = worker.exchange(gradients_of(weights, batch))
        if advance.state is not None:
            weights = dict(advance.state.tensors)
        for average in advance.averages:
            weights = {name: weights[name] - 0.1 * average[name] for name in weights}

`gradserve.torch` and `gradserve.jax` do this for PyTorch and JAX.
"""

from gradserve.public_names import publish as _publish
from gradserve.training.run import Advance
from gradserve.training.state import State
from gradserve.training.worker import Worker

__all__ = ["Advance", "State", "Worker"]

_publish(__name__, globals(), __all__)
