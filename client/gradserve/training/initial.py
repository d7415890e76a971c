"""The parameters with which all workers of a training run begin."""

from gradserve.client import Client
from gradserve.errors import AlreadyExistsError
from gradserve.results import Average
from gradserve.training.first import of_first_worker
from gradserve.training.state import COMPONENTS, Arrived, Carried, State


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
    if not carried.layout:
        return None
    # Kept for a day after the last worker began: it takes as much memory as the model.
    first = of_first_worker(client, f"{name}/initial", container, worker_id, COMPONENTS, carried.gradient)
    return None if first is None else _as_all(first, carried, own)


def _as_all(average: Average, carried: Carried, own: State) -> State:
    """Returns what the first worker began with, for a worker whose own state has the same tensors."""
    first = Arrived.of(average)
    for name in {**first.layout, **carried.layout}:
        if first.layout.get(name) != carried.layout.get(name):
            raise AlreadyExistsError(
                f"the first worker of the training run began with {_described(first, name)}, and this worker has "
                f"{_described(carried, name)}; all workers must begin with the same tensors",
                field="state",
            )
    return State(first.state.tensors, own.metadata)


def _described(state: Arrived | Carried, name: str) -> str:
    if name not in state.layout:
        return f"no tensor {name!r}"
    dtype, shape = state.layout[name]
    return f"tensor {name!r} of dtype {dtype} and shape {tuple(shape)}"
