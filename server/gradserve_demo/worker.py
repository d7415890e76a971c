"""The main function of a worker process, and the messages between it and the coordinator."""

import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import gradserve
from gradserve_demo.digits import Batches, Digits
from gradserve_demo.network import TANH, HiddenLayer, Weights, accuracy, loss_and_gradients
from gradserve_demo.options import DemoError, DemoOptions
from gradserve_demo.replica import Replica, ServedBatchNormLayer


@dataclass(frozen=True)
class WorkerTask:
    """Everything a worker process needs; sent to it when it is spawned."""

    index: int
    """The index of the worker's share of every joint batch."""

    options: DemoOptions
    """The options of the demo."""

    address: str
    """The address of the server."""

    run_name: str
    """Prefix of the names of everything that this run has on the server."""

    num_steps: int
    """Steps until the training is over."""

    weights: Weights
    """The initial weights."""

    digits: Digits
    """The data of all workers."""

    batches: Batches
    """Determines the worker's examples at every step."""

    @property
    def worker_id(self) -> str:
        """Its name on the server."""
        return f"worker-{self.index}"

    @property
    def is_slow(self) -> bool:
        """True if it is artificially slow, as the last of the backup workers is."""
        return self.options.backup > 0 and self.index == self.options.num_processes - 1


@dataclass(frozen=True)
class Ready:
    """The worker is connected and waits for the signal to start."""


@dataclass(frozen=True)
class Stepped:
    """The worker has pushed a gradient and then applied every average up to `step`."""

    step: int
    """Number of averages applied to its weights so far."""

    loss: float
    """Loss of its share of the batch, before the push."""

    accepted: bool
    """True if the gradient was part of the round; False if it was stale."""

    accuracy: float | None
    """Accuracy on the test images; set by the first worker at the end of an epoch."""


@dataclass(frozen=True)
class Finished:
    """The worker has applied the average of every round."""

    weights: Weights
    """Its final weights, and the state of its hidden layer."""

    contributed: int
    """Pushes that were accepted."""

    stale: int
    """Pushes that came too late."""

    snapshots_loaded: int
    """The number of times that it was too far behind and had to take the weights of another worker."""


@dataclass(frozen=True)
class Failed:
    """The worker gave up."""

    error: str
    """The exception in one line."""

    traceback: str
    """The exception's traceback."""


Message: TypeAlias = Ready | Stepped | Finished | Failed


WorkerConnection: TypeAlias = "Connection[Message, None]"


def main(task: WorkerTask, connection: WorkerConnection) -> None:
    """Trains until the last step, and reports to the coordinator.

    Errors are reported too; this function does not raise.
    """
    # Ctrl-C reaches every process of the terminal, but the coordinator ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A broken pipe means that the coordinator is gone: there is nobody to tell.
    with connection, suppress(BrokenPipeError):
        try:
            _train(task, connection)
        except Exception as error:
            connection.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _train(task: WorkerTask, connection: WorkerConnection) -> None:
    options = task.options
    with (
        gradserve.connect(task.address, timeout=options.timeout) as client,
        Replica(client, task.run_name, task.weights, task.worker_id, options) as replica,
    ):
        layer = _hidden_layer(client, task)
        connection.send(Ready())
        # The signal to start comes when the slowest process is ready.
        if not connection.poll(options.timeout):
            raise DemoError(f"no word to start within {options.timeout:g} seconds")
        connection.recv()

        while replica.step < task.num_steps:
            step = replica.step
            examples = task.batches.share(step, task.index)
            images, labels = task.digits.train_images[examples], task.digits.train_labels[examples]
            loss, gradients = loss_and_gradients(replica.weights, images, labels, layer)
            if task.is_slow:
                time.sleep(options.slow_seconds)
            accepted = replica.push(gradients)
            layer.end_step(replica.weights)
            steps_per_epoch = task.batches.steps_per_epoch
            epoch_ended = replica.step // steps_per_epoch > step // steps_per_epoch
            test_accuracy = None
            if task.index == 0 and epoch_ended:
                test_accuracy = accuracy(replica.weights, task.digits.test_images, task.digits.test_labels, layer)
            connection.send(Stepped(replica.step, loss, accepted, test_accuracy))
        weights = replica.weights | layer.state()
        connection.send(Finished(weights, replica.contributed, replica.stale, replica.snapshots_loaded))


def _hidden_layer(client: gradserve.Client, task: WorkerTask) -> HiddenLayer:
    if not task.options.batch_norm:
        return TANH
    units = len(task.weights["gamma"])
    return ServedBatchNormLayer(client, task.run_name, units, worker=task.index, num_workers=task.options.workers)
