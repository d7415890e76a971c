"""Contestants of a benchmark whose server is behind a link."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.comparison import Comparison, ComparisonResult
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.links.hub import Spoke, links_to_hub
from benchmarks.harness.links.network import LinkNotAvailableError
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


@pytest.mark.parametrize("round_trip", [0.0, 0.04])
def test_workers_without_a_server_have_a_link_each(round_trip: float) -> None:
    """What one sends to another takes as long as the cap and the delay say."""
    number = 3
    with hub_or_skip(number, 20, round_trip) as spokes:
        command = [sys.executable, "-c", _RECEIVE, spokes[0].address]
        with subprocess.Popen([*spokes[0].enter, *command], stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == b"listening\n"
            sent = subprocess.run(
                [*spokes[2].enter, sys.executable, "-c", _SEND, spokes[0].address], capture_output=True, check=True
            )
    answer, seconds = map(float, sent.stdout.split())
    assert answer >= round_trip
    assert seconds >= 0.8 * 1_000_000 * 8 / 20e6
    assert len({each.address for each in spokes}) == number


_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        connection.sendall(connection.recv(1))
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"!")
"""
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    start = time.monotonic()
    connection.sendall(b"?")
    connection.recv(1)
    print(time.monotonic() - start)
    start = time.monotonic()
    connection.sendall(bytes(1_000_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.monotonic() - start)
"""


@contextlib.contextmanager
def hub_or_skip(number: int, megabits: float, round_trip: float) -> Iterator[list[Spoke]]:
    try:
        with links_to_hub(number, megabits, round_trip) as spokes:
            yield spokes
    except LinkNotAvailableError as error:
        pytest.skip(f"no links: {error}")
