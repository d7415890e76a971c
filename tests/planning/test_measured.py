"""Forecasts beside measured rounds on one, two and four servers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.cluster import NUM_SERVERS
from benchmarks.plan_plot import deployment_of
from gradserve_server.planning.simulation import simulate

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def measured() -> Iterator[Any]:
    """Yields what the newest results of the case have: a title, a number of servers, and the seconds of a round."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        results = [each for each in json.loads(path.read_text())["results"] if "to each server" in each["title"]]
        for result in results:
            for each in result["contestants"]:
                size = NUM_SERVERS[each["label"]]
                yield pytest.param(result["title"], size, each["seconds"]["median"], id=f"{result['title']}, {size}")
        if results:
            return


@pytest.mark.parametrize(("title", "num_servers", "seconds"), list(measured()))
def test_the_forecast_is_near(title: str, num_servers: int, seconds: float) -> None:
    forecast = simulate(deployment_of(num_servers, title))
    assert forecast.round_seconds == pytest.approx(seconds, rel=0.15)
