"""How the workers of a new run agree that an earlier one of the same name is over."""

import numpy as np

from gradserve.client import Client
from gradserve.results import DenseSpec
from gradserve.training.first import of_first_worker

PAUSE_SECONDS = 0.1
"""The pause between two looks for what another worker does."""


def is_successor(client: Client, name: str, container: str, worker_id: str) -> bool:
    """Returns True for exactly one of the workers that ask: the one that deletes the accumulator of a run that is over.

    It is the worker with the only gradient of the first round of accumulator NAME/successor.

    Args:
        client: The client.
        name: The name of the run that is over, with what distinguishes it from others of the same name.
        container: The namespace of the name.
        worker_id: The id of this worker.
    """
    components, claim = {"claim": DenseSpec("float32", ())}, {"claim": np.float32(1)}
    return of_first_worker(client, f"{name}/successor", container, worker_id, components, lambda: claim) is None
