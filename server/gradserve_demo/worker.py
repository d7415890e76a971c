"""The main function of a worker process."""

import signal
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeAlias

import gradserve
from gradserve_demo.errors import DemoError
from gradserve_demo.hidden_layer import HiddenLayer
from gradserve_demo.messages import Failed, Finished, Message, Ready, Stepped, WorkerTask
from gradserve_demo.network import TANH, accuracy, loss_and_gradients
from gradserve_demo.replica import Replica
from gradserve_demo.served_batch_norm import ServedBatchNormLayer

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
    with gradserve.connect(task.address, timeout=task.timeout) as client:
        replica = Replica(
            client,
            task.run_name,
            task.weights,
            worker_id=task.worker_id,
            num_required=task.num_required,
            learning_rate=task.learning_rate,
            keep_averages=task.keep_averages,
            timeout=task.timeout,
        )
        layer = _hidden_layer(client, task)
        connection.send(Ready())
        # The signal to start comes when the slowest process is ready.
        if not connection.poll(task.timeout):
            raise DemoError(f"no word to start within {task.timeout:g} seconds")
        connection.recv()

        while replica.step < task.num_steps:
            step = replica.step
            examples = task.batches.share(step, task.index)
            images, labels = task.digits.train_images[examples], task.digits.train_labels[examples]
            loss, gradients = loss_and_gradients(replica.weights, images, labels, layer)
            time.sleep(task.pause)  # 0 for all but the artificially slow worker.
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
    if not task.batch_norm:
        return TANH
    units = len(task.weights["gamma"])
    return ServedBatchNormLayer(client, task.run_name, units, worker=task.index, num_workers=task.num_required)
