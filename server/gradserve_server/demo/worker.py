"""The main function of a worker process."""

import signal
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeAlias

import gradserve
from gradserve_server.demo.errors import DemoError
from gradserve_server.demo.messages import Failed, Finished, Message, Ready, Stepped, WorkerTask
from gradserve_server.demo.network import loss_and_gradients
from gradserve_server.demo.replica import Replica

WorkerConnection: TypeAlias = "Connection[Message, None]"


def main(task: WorkerTask, connection: WorkerConnection) -> None:
    """Trains until the last step, and reports to the coordinator.

    Whatever goes wrong is reported as well; this function does not raise.
    """
    # Ctrl-C reaches every process of the terminal; the coordinator ends its workers itself.
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
        connection.send(Ready())
        # The word to start comes when the slowest process is up.
        if not connection.poll(task.timeout):
            raise DemoError(f"no word to start within {task.timeout:g} seconds")
        connection.recv()

        while replica.step < task.num_steps:
            step = replica.step
            examples = task.batches.share(step, task.index)
            loss, gradients = loss_and_gradients(replica.weights, task.images[examples], task.labels[examples])
            time.sleep(task.pause)  # Artificial slowness; 0 for all but the slow worker.
            accepted = replica.push(gradients)
            steps_per_epoch = task.batches.steps_per_epoch
            epoch_ended = replica.step // steps_per_epoch > step // steps_per_epoch
            weights = replica.weights if task.index == 0 and epoch_ended else None
            connection.send(Stepped(replica.step, loss, accepted, weights))
        connection.send(Finished(replica.weights, replica.contributed, replica.stale, replica.snapshots_loaded))
