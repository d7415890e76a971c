"""The parameters with which all workers of a training run begin."""

import numpy as np

from gradserve.client import Client
from gradserve.errors import AlreadyExistsError
from gradserve.results import Outcome
from gradserve.training.state import Carried, State, restored, specs_of

_KEPT_SECONDS = 24 * 3600.0
"""How long after the last worker began it is kept: it takes as much memory as the model."""


def agreed_initial_state(client: Client, name: str, container: str, worker_id: str, own: State) -> State | None:
    """Makes the state of the first worker that comes that of all.

    It is the average of the first round of accumulator NAME/initial, which has one gradient.

    Args:
        client: The client.
        name: The name of the training run, with what distinguishes it from earlier runs of the same name.
        container: The namespace of the name.
        worker_id: The id of this worker.
        own: The state of this worker.

    Returns:
        The tensors of the first worker, with this worker's metadata; None if this worker is the first.

    Raises:
        AlreadyExistsError: The first worker has other tensors.
        InvalidArgumentError: The state cannot travel.
    """
    carried = Carried.of(own)
    layout = carried.layout
    if not layout:
        return None
    try:
        accumulator = client.gradient_accumulator(
            specs_of(layout),
            shared_name=f"{name}/initial",
            container=container,
            idle_lease=_KEPT_SECONDS,
            device="cpu",
            sharded=False,
        )
    except AlreadyExistsError as error:
        error.add_note("All workers of a training run must begin with the same tensors.")
        raise
    if accumulator.info().global_step:
        return State(restored(accumulator.read_average(1), layout), own.metadata)
    result = accumulator.push_pull(carried.tensors, 1, worker_id=worker_id, on_stale="return")
    if result.outcome is Outcome.ACCEPTED:
        return None
    return State(restored({each: np.asarray(result[each]) for each in layout}, layout), own.metadata)
