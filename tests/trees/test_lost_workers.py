"""A worker that is lost does not hold up the others of its host; one that is late still counts."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradserve
from tests.servers.polling import eventually
from tests.trees.servers import end_grace, running_tree_on
from tests.trees.workers import at_once, clients_of

NEVER = 1e6
"""A grace that ends only when a test says so."""
ON = pytest.mark.parametrize("num_servers", [1, 2], ids=["whole", "sharded"])


def _gradient(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(3, value, np.float32)}


@ON
def test_a_lost_worker_does_not_hold_up_the_others(num_servers: int) -> None:
    with (
        running_tree_on(num_servers, 3, NEVER) as (_, near),
        clients_of(near.address, 2) as clients,
        ThreadPoolExecutor(2) as threads,
    ):
        made = [each.gradient_accumulator(_gradient(0), "net") for each in clients]
        for step in range(2):
            pulls = [
                threads.submit(acc.push_pull, _gradient(value), 2, step)
                for acc, value in zip(made, (1, 3), strict=True)
            ]
            end_grace(near, 2)
            results = [each.result() for each in pulls]
            assert [(each.num_gradients, each["w"][0]) for each in results] == [(2, 2.0)] * 2
        assert near.server.counts.sums == 2


@ON
def test_a_late_gradient_joins_the_round_of_the_others(num_servers: int) -> None:
    """With its weight: the mean is that of all three."""
    with running_tree_on(num_servers, 3, NEVER) as (addresses, near), clients_of(near.address, 3) as clients:
        made = [each.gradient_accumulator(_gradient(0), "net") for each in clients]
        with ThreadPoolExecutor(3) as threads:
            first = [threads.submit(acc.push_pull, _gradient(1), 3, 0, weight=2.0) for acc in made[:2]]
            end_grace(near, 2)
            with gradserve.connect(addresses) as client:
                acc = client.gradient_accumulator(_gradient(0), "net")
                eventually(lambda: acc.num_accumulated() == 2)
            # Nobody else is left to wait for.
            late = made[2].push_pull(_gradient(6), 3, 0, weight=1.0)
            for each in (late, *[one.result() for one in first]):
                assert (each.num_gradients, each.total_weight, each["w"][0]) == (3, 5.0, 2.0)


@ON
def test_a_gradient_after_the_round_is_stale(num_servers: int) -> None:
    with running_tree_on(num_servers, 3, 0.3) as (_, near), clients_of(near.address, 3) as clients:
        made = [each.gradient_accumulator(_gradient(0), "net") for each in clients]
        at_once(lambda acc: acc.push_pull(_gradient(1), 2, 0), made[:2])
        with pytest.raises(gradserve.StaleGradientError) as raised:
            made[2].push_pull(_gradient(9), 2, 0)
        assert raised.value.result is not None
        assert (raised.value.global_step, raised.value.result["w"][0]) == (1, 1.0)
