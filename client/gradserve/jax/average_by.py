"""Averages gradients over workers."""

from collections.abc import Mapping
from typing import Literal

from gradserve.client import Client
from gradserve.jax.transformation import AverageBy
from gradserve.results import DenseSpec
from gradserve.training import Worker


def average_by(
    client: Client,
    *,
    num_required: int,
    name: str,
    worker_id: str | None = None,
    container: str = "",
    timeout: float | None = None,
    keep_averages: int = 4,
    deterministic: bool = False,
    refuse_non_finite: bool = True,
    durability: str | None = None,
    idle_lease: float | None = None,
    settings: Mapping[str, str] | None = None,
    if_exists: Literal["join", "new", "error"] = "join",
) -> AverageBy:
    """Returns an Optax transformation that replaces gradients by their average over the workers of a training run.

    averaging = gradserve.jax.average_by(client, num_required=4, name="digits")
    optimizer = optax.chain(averaging, optax.adam(1e-3))
    params, opt_state = averaging.begin(params, optimizer.init(params))

    All workers apply the same averages in the same order to the same parameters: so they have equal parameters at equal
    steps. A gradient is named by the path to it ("layers/0/w"), as in `client.gradient_accumulator(params)`; workers
    with other frameworks use these names.

    Args:
        client: The client of the server, which stays open for at least as long.
        num_required: The number of gradients in an average: the number of workers, or fewer if some are backups, or may
            die. The same for all workers.
        name: The name of the training run: all workers with the same name and container train together.
        worker_id: An id that no other worker of the run has. None: one is made.
        container: The namespace of the name.
        timeout: Seconds to wait for a round, or for the state of another worker; and for a server that is gone, unless
            GRADSERVE_RESTART_PATIENCE is set. None: the client's timeout.
        keep_averages: The number of past rounds whose averages the server keeps for late workers. A worker that is
            later gets the state of another one.
        deterministic: Whether the same gradients give the same bits in whatever order they arrive.
        refuse_non_finite: Whether gradients with infinities or NaN are refused, with an InvalidArgumentError that names
            the parameter. Otherwise they reach the weights of all workers.
        durability: What the server keeps of the run on its disk, as in `Client.gradient_accumulator`. None: what the
            server was started with.
        idle_lease: Seconds after its last use by a worker at which the run is deleted. None: never.
        settings: What all workers must have been started with, as texts by name, such as {"learning rate": "0.1"}:
            Optax keeps that in closures. The transformations that the optimizer is made of are compared anyway, and the
            values of `optax.inject_hyperparams`.
        if_exists: What to do if there is a run of this name that has taken steps. "join": go on with its state. "new":
            the same if any of its workers is there; otherwise delete it and begin anew. "error": raise
            AlreadyExistsError.
    """

    def worker(parameters: dict[str, DenseSpec], of_optimizer: dict[str, str]) -> Worker:
        return Worker(
            client,
            parameters,
            name=name,
            num_required=num_required,
            worker_id=worker_id,
            container=container,
            timeout=timeout,
            keep_averages=keep_averages,
            deterministic=deterministic,
            refuse_non_finite=refuse_non_finite,
            durability=durability,
            idle_lease=idle_lease,
            if_exists=if_exists,
            settings={"jax": {**of_optimizer, **(settings or {})}},
        )

    return AverageBy(worker)
