"""Batch normalization and relu by one layer on the server, which all workers share.

The layer holds beta, gamma and the moving averages. What keeps it in step with the workers is the round of gradients
that ends every step: it is complete when every worker has pushed, so after every forward and backward of the step. A
worker then, before it goes on,

1. sets beta and gamma to its own, which are those of all workers;
2. runs the updates of the step's forwards, in the order of the workers. Their ids follow from run, step and worker, so
   that each worker knows them all.

All workers do both, and say the same: whoever comes first does it, for the others nothing is left to change. The server
runs the updates of a forward once, however often it is named. Nobody can come so late that it would undo something:
until this worker has pushed its next gradient, there is no next round, and no other beta and gamma. So there is no
leader whom the others would wait for, and no second barrier. This needs a round that takes a gradient of every worker:
with backup workers a step may end before some of its forwards.
"""

from collections.abc import Mapping

import numpy as np

import gradserve
from gradserve_demo.arrays import FloatArray, Weights
from gradserve_demo.batch_norm import DECAY, EPSILON
from gradserve_demo.hidden_layer import Backward

_WEIGHTS = ("beta", "gamma")


class ServedBatchNormLayer:
    """One worker's view of the layer."""

    def __init__(self, client: gradserve.Client, run_name: str, units: int, *, worker: int, num_workers: int) -> None:
        """Finds or creates the layer of a run.

        Args:
            client: Connection to the server.
            run_name: The same for all workers of a run.
            units: Channels of the layer.
            worker: Which of the workers this is, from 0.
            num_workers: How many share the layer.
        """
        self._layer = create_layer(client, run_name, units)
        self._worker = worker
        self._num_workers = num_workers
        self._step = 0

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Lets the server normalise by the moments of the inputs, with the beta and gamma that it holds."""
        forward = self._layer.forward(inputs, forward_id=self._forward_id(self._worker))

        def backward(d_outputs: FloatArray) -> tuple[FloatArray, Weights]:
            gradients = self._layer.backward(d_outputs, forward)
            return gradients.inputs, {name: getattr(gradients, name) for name in _WEIGHTS}

        return forward.outputs, backward

    def infer(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> FloatArray:
        """Lets the server normalise by its moving averages."""
        outputs: FloatArray = self._layer(inputs, is_training=False)
        return outputs

    def end_step(self, weights: Mapping[str, FloatArray]) -> None:
        """Brings the layer in step with the workers; see above."""
        self._layer.set_variables({name: weights[name] for name in _WEIGHTS})
        self._layer.run_updates([self._forward_id(worker) for worker in range(self._num_workers)])
        self._step += 1

    def state(self) -> Weights:
        """Returns all variables, beta and gamma too: what the server has is what the training is judged by."""
        return self._layer.get_variables()

    def _forward_id(self, worker: int) -> str:
        """Returns the id of a worker's forward at the present step."""
        return f"step-{self._step}/worker-{worker}"


def create_layer(client: gradserve.Client, run_name: str, units: int) -> gradserve.BatchNormLayer:
    """Finds or creates the layer of a run; its beta is 0 and its gamma 1, as those of the workers."""
    return client.batch_norm(
        decay=DECAY,
        scale=True,
        epsilon=EPSILON,
        activation_fn="relu",
        scope=f"{run_name}/batch_norm",
        input_shape=(None, units),
        dtype=np.float32,
    )
