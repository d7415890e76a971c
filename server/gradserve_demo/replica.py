"""The state that a worker keeps in step with the others through the server: its weights, and its hidden layer."""

from collections.abc import Mapping
from typing import cast

import numpy as np

import gradserve
from gradserve_demo.network import DECAY, EPSILON, Backward, FloatArray, Weights, descend
from gradserve_demo.options import DemoError

_WEIGHTS = ("beta", "gamma")


class Replica:
    """One worker's copy of the weights, kept equal to all other copies through the server.

    One rule keeps the copies equal, bit for bit: every copy starts from the same weights and applies the average of
    every round exactly once, in order. No copy ever applies its own gradient alone.

    A worker whose gradient comes too late (a stale push) has missed one or more rounds. It reads their averages, which
    the server keeps for a while, and applies them one by one. If some of them are already gone, it loads a snapshot of
    the weights and continues from there. Snapshots live in a second accumulator: every `snapshot_interval` steps, each
    worker pushes its weights to a round that needs one gradient; the first push is the snapshot, the others are stale.

    Attributes:
        weights: The current weights.
        step: The number of averages that have been applied to them.
        contributed: Pushes that became part of a round.
        stale: Pushes that came too late.
        snapshots_loaded: The number of times that the weights came from a snapshot.
    """

    def __init__(
        self,
        client: gradserve.Client,
        run_name: str,
        weights: Mapping[str, FloatArray],
        *,
        worker_id: str,
        num_required: int,
        learning_rate: float,
        keep_averages: int,
        timeout: float,
    ) -> None:
        """Finds or creates the accumulators of the run.

        Args:
            client: Connection to the server.
            run_name: Prefix of the accumulators' names, the same for all workers of a run.
            weights: The initial weights, the same for all workers.
            worker_id: Name of this worker, different for all workers.
            num_required: Gradients that complete a round.
            learning_rate: Step size of plain gradient descent.
            keep_averages: Averages of past rounds that the server keeps.
            timeout: Seconds that any single wait may take.
        """
        self.weights: Weights = dict(weights)
        self.step = 0
        self.contributed = 0
        self.stale = 0
        self.snapshots_loaded = 0
        self._worker_id = worker_id
        self._num_required = num_required
        self._learning_rate = learning_rate
        self._timeout = timeout
        # The first average after a snapshot must still be kept when a straggler has loaded the snapshot,
        # so the interval of snapshots is a fraction of the number of kept averages.
        self._snapshot_interval = max(1, keep_averages // 4)
        self._gradients, self._snapshots = create_accumulators(client, run_name, weights, keep_averages)

    def push(self, gradients: Mapping[str, FloatArray]) -> bool:
        """Contributes a gradient at the current weights, and brings the weights up to date.

        If the gradient is part of the round, blocks until the round is complete.

        Returns:
            True if the gradient was part of the round. If not, the weights have still advanced, by
            what the other workers contributed.
        """
        result = self._gradients.push_pull(
            gradients,
            num_required=self._num_required,
            local_step=self.step,
            worker_id=self._worker_id,
            on_stale="return",
            timeout=self._timeout,
        )
        if result.outcome is gradserve.ACCEPTED:
            self.contributed += 1
            self._apply(result)
            return True
        self.stale += 1
        if result and result.step == self.step + 1:
            # Only one round was missed, and the reply contains its average.
            self._apply(result)
        self._catch_up(result.global_step)
        return False

    def _apply(self, average: gradserve.Average) -> None:
        """Applies the average of the next round."""
        step = average.step
        if step != self.step + 1:
            raise DemoError(f"{self._worker_id} is at step {self.step} and got the average of step {step}")
        self.weights = descend(self.weights, _arrays(average), self._learning_rate)
        self.step = step
        # Done before the next push, so that no round ends between the time a snapshot is due and its creation.
        if step % self._snapshot_interval == 0:
            self._snapshots.push_pull(
                self.weights,
                num_required=1,
                local_step=step // self._snapshot_interval - 1,
                worker_id=self._worker_id,
                on_stale="return",  # another worker was first, with the same weights
                timeout=self._timeout,
            )

    def _catch_up(self, target: int) -> None:
        """Applies every average up to the one that led to the `target` step."""
        while self.step < target:
            try:
                average = self._gradients.read_average(self.step + 1, timeout=self._timeout)
            except gradserve.OutOfRangeError:
                self._load_snapshot()
            else:
                self._apply(average)

    def _load_snapshot(self) -> None:
        """Replaces the weights by the newest snapshot."""
        snapshot = self._snapshots.read_average(timeout=self._timeout)
        step = snapshot.step * self._snapshot_interval
        if step <= self.step:
            raise DemoError(
                f"{self._worker_id} is at step {self.step}; the average of the next step is no longer kept, "
                f"and the newest snapshot is of step {step}"
            )
        self.weights = _arrays(snapshot)
        self.step = step
        self.snapshots_loaded += 1


def create_accumulators(
    client: gradserve.Client, run_name: str, weights: Mapping[str, FloatArray], keep_averages: int
) -> tuple[gradserve.GradientAccumulator, gradserve.GradientAccumulator]:
    """Finds or creates the two accumulators of a run: for gradients, and for snapshots of the weights."""
    gradients = client.gradient_accumulator(
        weights,
        shared_name=f"{run_name}/gradients",
        # The same gradients give the same average, in whatever order they arrive.
        deterministic=True,
        keep_averages=keep_averages,
    )
    return gradients, client.gradient_accumulator(weights, shared_name=f"{run_name}/snapshots")


def _arrays(average: gradserve.Average) -> Weights:
    """Returns the components of an average, all of which are dense here."""
    return cast(Weights, dict(average))


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
