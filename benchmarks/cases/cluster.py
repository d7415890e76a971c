"""Rounds of a model in several accumulators on one, two and four servers, each behind a link of its own.

Beside gloo, which has no servers: there each worker is behind such a link.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import BULK
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.links.spec import LinkSpec
from benchmarks.harness.verdicts import Target

NUM_WORKERS = 4
_NUM_PARTS = 8
NUM_BYTES = 100 * MB
_LINKS = (LinkSpec(200), LinkSpec(200, 0.04))
_ONE, _TWO, _FOUR = "one server", "two servers", "four servers"
NUM_SERVERS = {_FOUR: 4, _TWO: 2, _ONE: 1}
"""The servers of each contestant with servers."""
_GLOO = "gloo all_reduce, a link to each worker"


def comparisons() -> list[Comparison]:
    """With and without delay."""
    return [_compare(link) for link in _LINKS]


def _compare(link: LinkSpec) -> Comparison:
    parts = BULK.contestant("parts", NUM_WORKERS, num_bytes=NUM_BYTES, num_parts=_NUM_PARTS)
    gloo = Contestant(
        _GLOO,
        PROJECT,
        worker="benchmarks.peers.gloo.all_reduce",
        num_workers=NUM_WORKERS,
        options={"num_bytes": NUM_BYTES, "bucket_bytes": None},
        worker_link=replace(link, by_packet=bool(link.round_trip)),
    )
    return Comparison(
        title=(
            f"round of {NUM_WORKERS} workers, {size_name(NUM_BYTES)} in {_NUM_PARTS} accumulators, "
            f"{link.name} to each server"
        ),
        contestants=(
            *(replace(parts, label=label, num_servers=size, link=link) for label, size in NUM_SERVERS.items()),
            gloo,
        ),
        # The payload of the whole round, in both directions.
        num_bytes=2 * NUM_WORKERS * NUM_BYTES,
        steps=1,
        targets=(Target(_ONE, (_ONE,), 3.3, _FOUR), Target(_ONE, (_ONE,), 1.8, _TWO)),
        num_own=len(NUM_SERVERS),
        warm_up_steps=1,
    )
