"""Rounds over links as in the field, beside a raw socket that moves as many bytes over the same link."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import BULK, GRPC
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.links.spec import LinkSpec
from benchmarks.harness.verdicts import Target

_RAW_SOCKET = "raw socket"
_NUM_WORKERS = 2
_SIZES = {
    LinkSpec(10): 1 * MB,
    LinkSpec(200): 10 * MB,
    LinkSpec(1000): 50 * MB,
    LinkSpec(10, 0.08): 1 * MB,
    LinkSpec(200, 0.02): 10 * MB,
    LinkSpec(200, 0.08): 10 * MB,
}
_TARGETS = tuple(Target(_RAW_SOCKET, (_RAW_SOCKET,), 0.9, way.label) for way in (BULK, GRPC))


def comparisons() -> list[Comparison]:
    """All links; a gradient takes about as long on each of them."""
    return [_compare(link, num_bytes) for link, num_bytes in _SIZES.items()]


def _compare(link: LinkSpec, num_bytes: int) -> Comparison:
    raw = Contestant(
        _RAW_SOCKET,
        PROJECT,
        server="benchmarks.peers.raw_socket.server",
        worker="benchmarks.peers.raw_socket.transfers",
        num_workers=_NUM_WORKERS,
        options={"num_bytes": num_bytes, "operation": "round"},
    )
    ways = (BULK, GRPC)
    contestants = (*(way.contestant("rounds", _NUM_WORKERS, num_bytes=num_bytes) for way in ways), raw)
    return Comparison(
        title=f"round of {_NUM_WORKERS} workers, {size_name(num_bytes)}, over {link.name}",
        contestants=tuple(replace(each, link=link) for each in contestants),
        # The payload of the whole round, because all of it goes through the one link.
        num_bytes=(_NUM_WORKERS + 1) * num_bytes,
        steps=1,
        targets=_TARGETS,
        num_own=len(ways),
        warm_up_steps=1,
    )
