"""Rounds of a model that is sharded over servers, behind links of their own, and on one machine."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.cases.cluster import NUM_BYTES, NUM_SERVERS, NUM_WORKERS
from benchmarks.cases.sizes import size_name
from benchmarks.cases.ways import BULK, IN_PLACE, SHARED_MEMORY, Way
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.links.spec import LinkSpec
from benchmarks.harness.verdicts import Target
from benchmarks.workloads.resnet50 import parameter_shapes

_LINKS = (LinkSpec(200), LinkSpec(200, 0.04))
_FOUR, _TWO, _ONE = NUM_SERVERS


def comparisons() -> list[Comparison]:
    """With and without delay; and through shared memory, where there is no link to share out."""
    return [*map(_over_links, _LINKS), *map(_on_one_machine, (IN_PLACE, SHARED_MEMORY))]


def comparisons_of_parameters() -> list[Comparison]:
    """With parameters on the servers, whose optimizer has momentum; behind links without delay."""
    link = _LINKS[0]
    contestants = [
        replace(
            BULK.contestant(
                "parameters",
                NUM_WORKERS,
                num_bytes=NUM_BYTES,
                optimizer="momentum",
                refuse_non_finite=True,
                sharded=size > 1,
            ),
            label=label,
            num_servers=size,
            link=link,
        )
        for label, size in NUM_SERVERS.items()
    ]
    return [
        Comparison(
            title=f"round of {NUM_WORKERS} workers, {size_name(NUM_BYTES)} of parameters, {link.name} to each server",
            contestants=tuple(contestants),
            num_bytes=2 * NUM_WORKERS * NUM_BYTES,
            steps=1,
            targets=(Target(_ONE, (_ONE,), 3.3, _FOUR), Target(_ONE, (_ONE,), 1.8, _TWO)),
            num_own=len(NUM_SERVERS),
            warm_up_steps=1,
        )
    ]


def _over_links(link: LinkSpec) -> Comparison:
    model = BULK.contestant("push_pull", NUM_WORKERS, num_bytes=NUM_BYTES)
    return Comparison(
        title=f"round of {NUM_WORKERS} workers, {_MODEL}, {link.name} to each server",
        contestants=tuple(
            replace(model, label=label, num_servers=size, link=link) for label, size in NUM_SERVERS.items()
        ),
        # The payload of the whole round, in both directions.
        num_bytes=2 * NUM_WORKERS * NUM_BYTES,
        steps=1,
        targets=(Target(_ONE, (_ONE,), 3.3, _FOUR), Target(_ONE, (_ONE,), 1.8, _TWO)),
        num_own=len(NUM_SERVERS),
        warm_up_steps=1,
    )


def _on_one_machine(way: Way) -> Comparison:
    model = way.contestant("push_pull", NUM_WORKERS)
    num_bytes = 4 * sum(map(math.prod, parameter_shapes().values()))
    return Comparison(
        title=f"round of {NUM_WORKERS} workers, a ResNet-50, {way.label.removeprefix('gradserve, ')}",
        contestants=tuple(replace(model, label=label, num_servers=NUM_SERVERS[label]) for label in (_TWO, _ONE)),
        num_bytes=2 * NUM_WORKERS * num_bytes,
        steps=3,
        targets=(Target(_ONE, (_ONE,), 1 / 1.15, _TWO),),
        num_own=2,
    )


_MODEL = f"{size_name(NUM_BYTES)} in one accumulator"
