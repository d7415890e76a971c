"""Contestants of a benchmark whose server is behind a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.comparison import Comparison, ComparisonResult
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.links.spec import LinkSpec
from tests.links.serving import link_or_skip

_NUM_BYTES = 100_000


def compare(link: LinkSpec, num_sockets: int = 1) -> ComparisonResult:
    options = {"num_bytes": _NUM_BYTES, "operation": "round", "num_sockets": num_sockets}
    peer = "benchmarks.peers.raw_socket"
    raw = Contestant("raw", PROJECT, f"{peer}.transfers", f"{peer}.server", 2, options, link=link)
    comparison = Comparison("a round", (raw,), _NUM_BYTES, steps=1, warm_up_steps=1)
    return comparison.run(Effort(1), lambda text: None)


@pytest.mark.parametrize(
    ("link", "num_sockets"),
    [(LinkSpec(200), 1), (LinkSpec(200, 0.02), 1), (LinkSpec(200, 0.02, by_packet=True), 3)],
    ids=str,
)
def test_a_round_over_a_link(link: LinkSpec, num_sockets: int) -> None:
    with link_or_skip(10, 0.02 if link.by_packet else 0.0):
        pass
    (outcome,) = compare(link, num_sockets).outcomes
    assert outcome.failure is None
    assert len(outcome.seconds) == 1


def test_a_machine_without_links_leaves_the_contestant_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (outcome,) = compare(LinkSpec(200)).outcomes
    assert outcome.failure == "not available: no link: ip is not installed"


@pytest.mark.parametrize(
    ("link", "name"),
    [
        (LinkSpec(10), "10 Mbit/s"),
        (LinkSpec(1000), "1 Gbit/s"),
        (LinkSpec(2500, 0.08), "2.5 Gbit/s, 80 ms"),
        (LinkSpec(200, 0.02, by_packet=True), "200 Mbit/s, 20 ms by packet"),
    ],
)
def test_the_name_of_a_link(link: LinkSpec, name: str) -> None:
    assert link.name == name
