"""Samples of long tables: what the short suite runs of them.

A function with the mark `sampled` runs there with as few of its cases as have each value of every parameter, with
`sampled(every=N)` with each Nth. The rest suite has the other cases.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest


def beside_samples(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases that are not in the samples of their tables."""
    tables: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("sampled"):
            tables[item.parent, item.originalname].append(item)
    return {case for cases in tables.values() for case in set(cases).difference(_sample(cases))}


def _sample(cases: Sequence[pytest.Function]) -> Sequence[pytest.Function]:
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    every = marker.kwargs.get("every")
    return _with_each_value(cases) if every is None else cases[::every]


def _with_each_value(cases: Sequence[pytest.Function]) -> Sequence[pytest.Function]:
    """Returns cases that together have all values: each time the one that adds most of them."""
    # A value is the same object in all cases that have it; not every value can be compared.
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    unseen = set[tuple[str, int]]().union(*values.values())
    taken = []
    while unseen:
        best, added = cases[0], 0
        for case in cases:
            if (more := len(unseen & values[case])) > added:
                best, added = case, more
                if added == len(values[case]):
                    break  # it has no value that was seen: no other adds more
        taken.append(best)
        unseen -= values[best]
    return taken
