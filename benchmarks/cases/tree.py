"""Rounds of eight workers on two hosts over a link to one server, with an aggregator on each host and without."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import BULK, SHARED_MEMORY
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.links.spec import LinkSpec
from benchmarks.harness.verdicts import Target

_NUM_HOSTS, _NUM_WORKERS = 2, 8
_NUM_BYTES = 100 * MB
_LINK = LinkSpec(200)
_TREE, _FLAT = "two aggregators", "no aggregators"
_LEAST = 3.0
"""The bytes into the server are divided by so much at least."""


def comparisons() -> list[Comparison]:
    """One comparison. All hosts share the link to the server; what is within a host has no limit."""
    over_link = BULK.contestant("push_pull", _NUM_WORKERS, num_bytes=_NUM_BYTES)
    on_host = SHARED_MEMORY.contestant("push_pull", _NUM_WORKERS, num_bytes=_NUM_BYTES)
    tree = replace(
        on_host,
        label=_TREE,
        link=_LINK,
        num_aggregators=_NUM_HOSTS,
        variables={"GRADSERVE_TRANSPORT": BULK.transport},
    )
    flat = replace(over_link, label=_FLAT, link=_LINK)
    return [
        Comparison(
            title=(
                f"round of {_NUM_WORKERS} workers on {_NUM_HOSTS} hosts, {size_name(_NUM_BYTES)}, "
                f"{_LINK.name} to the server"
            ),
            contestants=(tree, flat),
            # The payload of the whole round, in both directions.
            num_bytes=2 * _NUM_WORKERS * _NUM_BYTES,
            steps=1,
            targets=(Target(_FLAT, (_FLAT,), _LEAST),),
            fewer_bytes=(Target(_FLAT, (_FLAT,), _LEAST),),
            num_own=2,
            warm_up_steps=1,
        )
    ]
