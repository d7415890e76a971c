"""How many servers a training run needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gradserve_server.planning.deployment import Deployment
from gradserve_server.planning.simulation import Forecast, simulate

_WORTHWHILE = 0.9
"""Twice as many servers are worth it if a round then takes at most this part of its time."""


@dataclass(frozen=True)
class Choice:
    """A number of servers, and what to expect of it.

    Attributes:
        num_servers: The number of servers.
        forecast: The forecast.
    """

    num_servers: int
    forecast: Forecast


def compare(deployment: Deployment, sizes: Sequence[int]) -> list[Choice]:
    """Returns the forecasts of a deployment for several numbers of servers."""
    return [Choice(size, simulate(replace(deployment, num_servers=size))) for size in sizes]


def sizes_up_to(most: int) -> list[int]:
    """Returns 1, 2, 4 and so on, and the greatest number itself."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if most == 1 else [*sizes, most]


def advise(choices: Sequence[Choice]) -> Choice:
    """Returns the smallest number of servers after which more of them hardly make rounds faster."""
    for choice, larger in pairwise(choices):
        if larger.forecast.round_seconds > _WORTHWHILE * choice.forecast.round_seconds:
            return choice
    return choices[-1]
