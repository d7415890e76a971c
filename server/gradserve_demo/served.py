"""The weights of a run on the server, and its hidden layer if that is there, too."""

from collections.abc import Mapping

import numpy as np

import gradserve
from gradserve import optim
from gradserve_demo.network import DECAY, EPSILON, Backward, FloatArray, Weights
from gradserve_demo.options import DemoOptions

_WEIGHTS = ("beta", "gamma")


def served_weights(
    client: gradserve.Client, run_name: str, weights: Mapping[str, FloatArray], options: DemoOptions
) -> gradserve.Parameters:
    """Finds or creates the weights of a run; only the values of the first call count."""
    return client.parameters(
        dict(weights),
        shared_name=run_name,
        update="delta" if options.diloco else "gradient",
        optimizer=optim.SGD(1.0 if options.diloco else options.learning_rate),
        num_required=options.workers,
        # The same gradients give the same weights, in whatever order they arrive.
        deterministic=True,
    )


class ServedBatchNormLayer:
    """One worker's view of a layer on the server, batch normalization and relu, that all workers share.

    The layer holds beta, gamma and the moving averages. The round of gradients that ends every step keeps it in step
    with the workers: the round is complete when every worker has pushed, and therefore after every forward and backward
    of the step. Each worker then, before it continues,

    1. sets beta and gamma to its own values, which are the same for all workers;
    2. runs the updates of the step's forwards, in the order of the workers. The forwards' ids follow from the step and
       the worker, so each worker knows all of them.

    All workers do both with the same values: the first one makes the change, and for the others nothing is left to
    change. The server runs the updates of a forward only once, however often it is named. No worker can be so late that
    it undoes something: until it has pushed its next gradient, there is no next round and no other beta and gamma. So
    no worker has to wait for a leader, and there is no second barrier. This requires rounds that need a gradient from
    every worker: with backup workers, a step could end before some of its forwards.
    """

    def __init__(self, client: gradserve.Client, run_name: str, units: int, *, worker: int, num_workers: int) -> None:
        """Finds or creates the layer of a run.

        Args:
            client: Connection to the server.
            run_name: Name of the run, the same for all of its workers.
            units: Channels of the layer.
            worker: Index of this worker, from 0.
            num_workers: Number of workers that share the layer.
        """
        self._layer = create_layer(client, run_name, units)
        self._worker = worker
        self._num_workers = num_workers
        self._step = 0

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Lets the server normalise by the moments of the inputs, with its own beta and gamma."""
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
        """Brings the layer in step with the workers; see the docstring of the class."""
        self._layer.set_variables({name: weights[name] for name in _WEIGHTS})
        self._layer.run_updates([self._forward_id(worker) for worker in range(self._num_workers)])
        self._step += 1

    def state(self) -> Weights:
        """Returns all variables, including beta and gamma: the training is judged by the server's values."""
        return self._layer.get_variables()

    def _forward_id(self, worker: int) -> str:
        """Returns the id of a worker's forward at the current step."""
        return f"step-{self._step}/worker-{worker}"


def create_layer(client: gradserve.Client, run_name: str, units: int) -> gradserve.BatchNormLayer:
    """Finds or creates the layer of a run; its beta starts at 0 and its gamma at 1, like those of the workers."""
    return client.batch_norm(
        decay=DECAY,
        scale=True,
        epsilon=EPSILON,
        activation_fn="relu",
        scope=f"{run_name}/batch_norm",
        input_shape=(None, units),
        dtype=np.float32,
    )
