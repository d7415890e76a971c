"""Servers behind links. A machine that cannot make links skips the tests that need them."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.harness.links.network import Link, LinkNotAvailableError, capped_link
from benchmarks.harness.links.spec import Ends, LinkSpec

CLIENT_LEASE_SECONDS = 1.0
"""Shorter than the time for which the tests fill a link."""


@contextlib.contextmanager
def link_or_skip(megabits: float, round_trip: float = 0.0) -> Iterator[Link]:
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(capped_link(megabits, round_trip))
        except LinkNotAvailableError as error:
            pytest.skip(f"no links on this machine: {error}")
        yield link


@contextlib.contextmanager
def serving_behind(spec: LinkSpec) -> Iterator[str]:
    """Runs a server at the other end of a link, and yields the address at which clients reach it."""
    with contextlib.ExitStack() as stack:
        try:
            ends = stack.enter_context(spec.up())
        except LinkNotAvailableError as error:
            pytest.skip(f"no links on this machine: {error}")
        stack.enter_context(_server(ends))
        yield ends.address


@contextlib.contextmanager
def _server(ends: Ends) -> Iterator[None]:
    config = {
        "listen": {"listen": [ends.listen], "bulk_listen": ends.bulk_listen, "shared_memory_socket": "off"},
        "leases": {"client_lease_seconds": CLIENT_LEASE_SECONDS},
        "runtime": {"warm_up": False},
    }
    command = [*ends.enter, sys.executable, "-m", "tests.links.server", json.dumps(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"serving\n"
            yield
        finally:
            server.stdin.close()
