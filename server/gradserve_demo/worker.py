"""The main function of a worker process, and the messages between it and the coordinator."""

import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import gradserve
from gradserve_demo.digits import Batches, Digits
from gradserve_demo.network import TANH, FloatArray, HiddenLayer, Weights, accuracy, descend, loss_and_gradients
from gradserve_demo.options import DemoError, DemoOptions
from gradserve_demo.served import ServedBatchNormLayer, served_weights


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
    """The worker is connected, has read the weights, and waits for the signal to start."""


@dataclass(frozen=True)
class Stepped:
    """The worker has pushed a gradient or a delta, and has the newest weights."""

    step: int
    """The number of steps behind its weights."""

    losses: tuple[float, ...]
    """Losses of its shares of the last batches, one for each step that it took."""

    accepted: bool
    """True if the push was part of the round; False if it was stale."""

    accuracy: float | None
    """Accuracy on the test images; set by the first worker at the end of an epoch."""


@dataclass(frozen=True)
class Finished:
    """The worker has read the weights of the last step."""

    weights: Weights
    """Its final weights, and the state of its hidden layer."""

    digest: str
    """The digest of the weights, by the server."""


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
    with gradserve.connect(task.address, timeout=options.timeout) as client:
        parameters = served_weights(client, task.run_name, task.weights, options)
        version = parameters.read()
        layer = _hidden_layer(client, task)
        connection.send(Ready())
        # The signal to start comes when the slowest process is ready.
        if not connection.poll(options.timeout):
            raise DemoError(f"no word to start within {options.timeout:g} seconds")
        connection.recv()

        def step_of(version: gradserve.Version) -> int:
            return min(version.step * options.sync_every, task.num_steps)

        while (step := step_of(version)) < task.num_steps:
            update, losses = _update(task, version.values, step, layer)
            if task.is_slow:
                time.sleep(options.slow_seconds)
            # The end of the round brings the weights to go on from; to a push that was too late, the newest ones.
            pulled = parameters.push_pull(update, version, worker_id=task.worker_id)
            version = pulled.version
            layer.end_step(version.values)
            steps_per_epoch = task.batches.steps_per_epoch
            epoch_ended = step_of(version) // steps_per_epoch > step // steps_per_epoch
            test_accuracy = None
            if task.index == 0 and epoch_ended:
                test_accuracy = accuracy(version.values, task.digits.test_images, task.digits.test_labels, layer)
            accepted = pulled.outcome is not gradserve.STALE
            connection.send(Stepped(step_of(version), tuple(losses), accepted, test_accuracy))
        connection.send(Finished(version.values | layer.state(), version.digest))


def _update(
    task: WorkerTask, weights: Mapping[str, FloatArray], step: int, layer: HiddenLayer
) -> tuple[Weights, list[float]]:
    """Returns a gradient, or the delta of several steps that the worker takes itself; and the losses."""
    options = task.options
    local: Mapping[str, FloatArray] = weights
    losses = []
    for each in range(step, min(step + options.sync_every, task.num_steps)):
        examples = task.batches.share(each, task.index)
        images, labels = task.digits.train_images[examples], task.digits.train_labels[examples]
        loss, gradients = loss_and_gradients(local, images, labels, layer)
        losses.append(loss)
        if options.diloco:
            local = descend(local, gradients, options.learning_rate)
    return {name: local[name] - weights[name] for name in weights} if options.diloco else gradients, losses


def _hidden_layer(client: gradserve.Client, task: WorkerTask) -> HiddenLayer:
    if not task.options.batch_norm:
        return TANH
    units = len(task.weights["gamma"])
    return ServedBatchNormLayer(client, task.run_name, units, worker=task.index, num_workers=task.options.workers)
