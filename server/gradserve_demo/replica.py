"""The state that a worker keeps in step with the others through the server: its weights, and its hidden layer."""

from collections.abc import Mapping
from typing import Self

import numpy as np

import gradserve
from gradserve.training import State, Worker
from gradserve_demo.network import DECAY, EPSILON, Backward, FloatArray, Weights, descend
from gradserve_demo.options import DemoOptions

_WEIGHTS = ("beta", "gamma")


class Replica:
    """One worker's copy of the weights, kept equal to all other copies through the server. A context manager.

    One rule keeps the copies equal, bit for bit: every copy starts from the same weights and applies the average of
    every round exactly once, in order. No copy ever applies its own gradient alone. `gradserve.training.Worker` brings
    the averages, also those of rounds that ended without this worker; if some of them are gone, another worker's
    weights.

    Attributes:
        worker: The worker's part in the training run.
        weights: The current weights.
        contributed: Pushes that became part of a round.
        stale: Pushes that came too late.
        snapshots_loaded: The number of times that the weights came from another worker.
    """

    def __init__(
        self,
        client: gradserve.Client,
        run_name: str,
        weights: Mapping[str, FloatArray],
        worker_id: str,
        options: DemoOptions,
    ) -> None:
        """Finds or begins the training run of a name; all of its workers have the same initial weights."""
        self.weights: Weights = dict(weights)
        self.contributed = 0
        self.stale = 0
        self.snapshots_loaded = 0
        self._learning_rate = options.learning_rate
        self.worker = Worker(
            client,
            weights,
            name=run_name,
            num_required=options.workers,
            worker_id=worker_id,
            keep_averages=options.keep_averages,
            timeout=options.timeout,
            # The same gradients give the same average, in whatever order they arrive.
            deterministic=True,
        )
        self.worker.begin(lambda: State(self.weights))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.worker.__exit__(kind, error, traceback)

    @property
    def step(self) -> int:
        """The number of averages that the weights have behind them."""
        return self.worker.step

    def push(self, gradients: Mapping[str, FloatArray]) -> bool:
        """Contributes a gradient at the current weights, and brings the weights up to date.

        If the gradient is part of the round, blocks until the round is complete.

        Returns:
            True if the gradient was part of the round. If not, the weights have still advanced, by
            what the other workers contributed.
        """
        advance = self.worker.exchange(gradients)
        if advance.state is not None:
            self.weights = {name: np.asarray(value) for name, value in advance.state.tensors.items()}
            self.snapshots_loaded += 1
        for average in advance.averages:
            self.weights = descend(self.weights, dict(average), self._learning_rate)
        if advance.was_late:
            self.stale += 1
        else:
            self.contributed += 1
        return not advance.was_late


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
