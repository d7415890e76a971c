"""What the first worker that comes has, for all others: how the workers of a run agree on anything."""

from collections.abc import Callable, Mapping
from typing import Any

from gradserve.client import Client
from gradserve.results import Average, DenseSpec, Outcome

DAY_SECONDS = 24 * 3600.0


def of_first_worker(
    client: Client,
    name: str,
    container: str,
    worker_id: str,
    components: Mapping[str, DenseSpec],
    own: Callable[[], Mapping[str, Any]],
    *,
    idle_lease: float = DAY_SECONDS,
    durability: str | None = None,
) -> Average | None:
    """Returns what the first worker has sent; None if this worker is the first.

    It is the average of the first round of an accumulator, which has one gradient.

    Args:
        client: The client.
        name: The name of the accumulator.
        container: The namespace of the name.
        worker_id: The id of this worker.
        components: The components of the accumulator.
        own: Returns what this worker sends; called only if no worker has sent anything yet.
        idle_lease: Seconds for which it is kept after its last use.
        durability: As in `Client.gradient_accumulator`.
    """
    accumulator = client.gradient_accumulator(
        dict(components),
        shared_name=name,
        container=container,
        idle_lease=idle_lease,
        durability=durability,
        device="cpu",
        sharded=False,
    )
    if accumulator.info().global_step:
        return accumulator.read_average(1)
    result = accumulator.push_pull(own(), 1, worker_id=worker_id, on_stale="return")
    return None if result.outcome is Outcome.ACCEPTED else result
