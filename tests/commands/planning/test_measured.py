"""Forecasts beside measured rounds on one, two and four servers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.cluster import NUM_SERVERS
from benchmarks.plan_plot import deployment_of
from gradserve_server.commands.planning import Deployment, simulate

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def measured() -> Iterator[Any]:
    """Yields what the newest results of the case have: a title, a number of servers, and the seconds of a round."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        results = [each for each in json.loads(path.read_text())["results"] if "to each server" in each["title"]]
        for result in results:
            for each in result["contestants"]:
                if (size := NUM_SERVERS.get(each["label"])) is None:
                    continue  # It has no servers.
                yield pytest.param(result["title"], size, each["seconds"]["median"], id=f"{result['title']}, {size}")
        if results:
            return


def measured_trees() -> Iterator[Any]:
    """Yields what the newest results of the case with aggregators have: the workers that share one, and the seconds."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        results = [each for each in json.loads(path.read_text())["results"] if "on 2 hosts" in each["title"]]
        for result in results:
            for each in result["contestants"]:
                per_host = 4 if "aggregators" in each["label"] and "no " not in each["label"] else 1
                yield pytest.param(per_host, each["seconds"]["median"], each["bytes_into_servers"], id=each["label"])
        if results:
            return


@pytest.mark.parametrize(("workers_per_host", "seconds", "num_bytes"), list(measured_trees()))
def test_the_forecast_of_a_tree_is_near(workers_per_host: int, seconds: float, num_bytes: float) -> None:
    run = Deployment(
        model_bytes=1e8,
        num_workers=8,
        num_required=8,
        num_servers=1,
        server_bandwidth=200e6 / 8,
        workers_per_host=workers_per_host,
    )
    forecast = simulate(run)
    assert forecast.round_seconds == pytest.approx(seconds, rel=0.15)
    assert forecast.server_bytes == pytest.approx(num_bytes, rel=0.15)


@pytest.mark.parametrize(("title", "num_servers", "seconds"), list(measured()))
def test_the_forecast_is_near(title: str, num_servers: int, seconds: float) -> None:
    forecast = simulate(deployment_of(num_servers, title))
    assert forecast.round_seconds == pytest.approx(seconds, rel=0.15)
