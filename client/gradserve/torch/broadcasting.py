"""Equal weights for all workers at the start."""

from collections.abc import Collection
from typing import Any

import torch

from gradserve.client import Client
from gradserve.results import DenseSpec
from gradserve.torch.state import TrainingState
from gradserve.torch.trained import module_of, trained_parameters
from gradserve.training import Worker


def broadcast_parameters(
    client: Client,
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    name: str,
    send_frozen: bool = True,
    leave_out: Collection[str] = (),
    container: str = "",
    timeout: float | None = None,
) -> bool:
    """Gives all workers of a run the weights of the first one: its parameters, buffers, and its optimizer's state.

    The first worker that calls this gives, all later ones take, however late they come: they begin where the first one
    began. Call it before `comm_hook` or `all_reduce_hook`. `average_gradients` does not need it.

    Args:
        client: The client.
        model: The model, in which weights are replaced. A DistributedDataParallel is looked into.
        optimizer: Its optimizer, if it has a state that must be equal, such as one loaded from a checkpoint.
        name: The name of the run.
        send_frozen: Whether frozen parameters are given, too; see `average_gradients`.
        leave_out: Names, or patterns of names, of frozen parameters and buffers that are not given.
        container: The namespace of the name.
        timeout: Seconds to wait for the weights. None: the client's timeout. math.inf: no limit.

    Returns:
        Whether the weights were replaced by those of another worker.

    Raises:
        InvalidArgumentError: The first worker has another model or optimizer, or an argument is not valid.
        AlreadyExistsError: The first worker has another model.
        GradserveError: The server cannot be reached, or refuses.
    """
    specs = {key: DenseSpec(each.dtype, tuple(each.shape)) for key, each in trained_parameters(model).items()}
    state = TrainingState(module_of(model), optimizer, send_frozen=send_frozen, leave_out=leave_out)
    run = f"{name}/broadcast"
    with Worker(client, specs, name=run, num_required=1, container=container, timeout=timeout) as worker:
        received = worker.begin(state.captured)
    if received is not None:
        state.load(received)
    return received is not None
