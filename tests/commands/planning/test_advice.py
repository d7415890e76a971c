"""How many servers are enough."""

import math
from dataclasses import replace

import pytest

from gradserve_server.commands.planning import Deployment, advise, compare, sizes_up_to

RUN = Deployment(model_bytes=1e9, num_workers=8, num_required=8, num_servers=1, server_bandwidth=1e9)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (10, [1, 2, 4, 8, 10])]
)
def test_the_sizes_that_are_compared(most: int, sizes: list[int]) -> None:
    assert sizes_up_to(most) == sizes


@pytest.mark.parametrize(
    ("deployment", "enough"),
    [
        (replace(RUN, server_bandwidth=math.inf, compute_seconds=1), 1),  # the network is no limit
        (replace(RUN, compute_seconds=1000), 1),  # hardly ever used
        (replace(RUN, worker_bandwidth=1e9), 8),  # eight links out of the workers, eight into servers
        (replace(RUN, worker_bandwidth=0.5e9), 4),
        (RUN, 64),  # twice as fast with twice as many, without end
    ],
)
def test_what_is_enough(deployment: Deployment, enough: int) -> None:
    assert advise(compare(deployment, sizes_up_to(64))).num_servers == enough
