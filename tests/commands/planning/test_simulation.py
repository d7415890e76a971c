"""Rounds as they can be computed by hand, and what must hold for all."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradserve_server.commands.planning import WIRE_EFFICIENCY, Deployment, simulate

LINK = 1e6 / WIRE_EFFICIENCY
"""A link that carries 1 MB of tensors in a second."""
RUN = Deployment(model_bytes=1e6, num_workers=4, num_required=4, num_servers=1, server_bandwidth=LINK)


@pytest.mark.parametrize(
    ("deployment", "seconds"),
    [
        (RUN, 8),  # four gradients in, four averages out
        (replace(RUN, num_servers=2), 4),
        (replace(RUN, num_servers=4), 2),
        (replace(RUN, num_workers=1, num_required=1), 2),
        (replace(RUN, worker_bandwidth=LINK / 10), 20),  # the workers' links are the narrow ones
        (replace(RUN, worker_bandwidth=LINK / 10, num_servers=4), 20),
        (replace(RUN, round_trip=0.5), 8.5),
        (replace(RUN, compute_seconds=3), 11),
        (replace(RUN, server_bandwidth=math.inf, compute_seconds=3, round_trip=1), 4),
    ],
)
def test_a_round(deployment: Deployment, seconds: float) -> None:
    forecast = simulate(deployment)
    assert forecast.round_seconds == pytest.approx(seconds)
    assert forecast.stale == 0
    assert forecast.computing == pytest.approx(deployment.compute_seconds / seconds)
    assert forecast.server_bytes == pytest.approx(
        deployment.model_bytes * deployment.num_workers / deployment.num_servers
    )


@pytest.mark.parametrize(
    ("deployment", "seconds", "num_hosts"),
    [
        (replace(RUN, workers_per_host=4), 2, 1),
        (replace(RUN, workers_per_host=2), 4, 2),
        (replace(RUN, workers_per_host=3), 4, 2),  # the second host has one worker
        (replace(RUN, workers_per_host=2, num_servers=2), 2, 2),
        (replace(RUN, workers_per_host=4, worker_bandwidth=LINK / 10), 20, 1),
        (replace(RUN, workers_per_host=2, round_trip=0.5, compute_seconds=3), 7.5, 2),
    ],
)
def test_a_round_with_aggregators(deployment: Deployment, seconds: float, num_hosts: int) -> None:
    forecast = simulate(deployment)
    assert forecast.round_seconds == pytest.approx(seconds)
    assert forecast.stale == 0
    assert forecast.server_bytes == pytest.approx(deployment.model_bytes * num_hosts / deployment.num_servers)


def test_an_aggregator_waits_no_longer_than_the_grace() -> None:
    """A slow worker holds its host up for so long, and no longer: then a round without it ends."""
    run = replace(
        RUN,
        server_bandwidth=math.inf,
        num_workers=8,
        num_required=6,
        workers_per_host=4,
        compute_seconds=10,
        jitter=1.0,
    )
    patient, hasty = simulate(replace(run, grace=1000.0), 200), simulate(replace(run, grace=0.01), 200)
    assert hasty.round_seconds < 0.7 * patient.round_seconds
    assert hasty.server_bytes > patient.server_bytes


def test_backup_workers_make_rounds_faster_at_the_price_of_stale_gradients() -> None:
    """Where times vary, the slowest of many is much slower than the second slowest."""
    run = replace(RUN, server_bandwidth=math.inf, num_workers=20, num_required=20, compute_seconds=1, jitter=0.5)
    all_of_them, most_of_them = simulate(run, 50), simulate(replace(run, num_required=18), 50)
    assert most_of_them.round_seconds < 0.8 * all_of_them.round_seconds
    assert all_of_them.stale == 0
    assert 0 < most_of_them.stale < 0.15


@settings(max_examples=40)
@given(
    num_workers=st.integers(1, 30),
    share=st.floats(0.5, 1),
    num_servers=st.integers(1, 8),
    jitter=st.floats(0, 0.5),
    compute_seconds=st.floats(0.01, 10),
)
def test_a_forecast_is_possible(
    num_workers: int, share: float, num_servers: int, jitter: float, compute_seconds: float
) -> None:
    run = replace(
        RUN,
        num_workers=num_workers,
        num_required=max(1, int(share * num_workers)),
        num_servers=num_servers,
        jitter=jitter,
        compute_seconds=compute_seconds,
    )
    forecast = simulate(run, 5)
    assert forecast.round_seconds > 0
    assert 0 <= forecast.computing <= 1
    assert 0 <= forecast.stale < 1
    at_least = run.num_required * run.part_bytes / run.capacity
    assert forecast.round_seconds >= 0.6 * at_least, "what a round needs has to come in through the link"
    assert simulate(run, 5) == forecast


@pytest.mark.exhaustive
def test_ten_thousand_workers_and_a_thousand_servers() -> None:
    run = Deployment(
        model_bytes=14e9,
        num_workers=10_000,
        num_required=9_500,
        num_servers=1000,
        server_bandwidth=100e9 / 8,
        worker_bandwidth=10e9 / 8,
        round_trip=0.04,
        compute_seconds=60,
        jitter=0.1,
    )
    forecast = simulate(run, 3)
    assert 60 < forecast.round_seconds < 120
    assert forecast.stale == pytest.approx(0.05, abs=0.01)
