"""The budget of small calls: `make costs`."""

from dataclasses import replace

import pytest

import gradserve
from deploy.costs import CALLS, WAYS, Costs, call_on, exceeded, least_count, read_budget, table

ALLOWED = Costs(
    {"client/calls": 50, "server/accumulators": 100, "server/rpc": 40}, 20_000, {"client": 4.0, "server": 8.0}
)


def problems(found: Costs) -> list[str]:
    return list(exceeded({"apply": found}, {"apply": ALLOWED}))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (replace(ALLOWED, calls={**ALLOWED.calls, "server/rpc": 20, "server/accumulators": 120}), None),
        (replace(ALLOWED, peak_bytes=24_000, system_calls={"client": 10.0, "server": 12.0}), None),
        (replace(ALLOWED, system_calls={}), None),
        (
            replace(ALLOWED, calls={**ALLOWED.calls, "server/accumulators": 120, "server/tracing": 3}),
            "apply: 163 calls on the server, about 140 are allowed: +20 in server/accumulators, +3 in server/tracing",
        ),
        (replace(ALLOWED, peak_bytes=30_000), "apply: 30,000 bytes at the peak, about 20,000 are allowed"),
        (
            replace(ALLOWED, system_calls={"client": 4.0, "server": 20.0}),
            "apply: 20 system calls of the server, about 8 are allowed",
        ),
    ],
)
def test_what_costs_more_than_it_may_is_named(found: Costs, expected: str | None) -> None:
    assert problems(found) == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("counted", "expected", "left"),
    [
        ([(5.0, 9.0), (1.0, 1.0)], (5.0, 9.0), 1),
        ([(5.0, 30.0), (6.0, 9.0), (1.0, 1.0)], (5.0, 9.0), 1),
        ([(50.0, 30.0), (6.0, 40.0), (9.0, 50.0), (7.0, 35.0), (1.0, 1.0)], (6.0, 30.0), 1),
        ([()], (), 0),
    ],
    ids=["few", "too many once", "too many", "no strace"],
)
def test_too_many_system_calls_are_counted_again(
    counted: list[tuple[float, ...]], expected: tuple[float, ...], left: int
) -> None:
    """As a busy machine adds to them."""
    counts = [dict(zip(("client", "server"), each, strict=False)) for each in counted]
    least = least_count(lambda: counts.pop(0), ALLOWED.system_calls)
    assert (tuple(least.values()), len(counts)) == (expected, left)


def test_a_call_without_a_budget_is_named() -> None:
    assert list(exceeded({"read": ALLOWED}, {})) == ["read: it has no budget"]


def test_the_budget_has_every_call_over_every_way() -> None:
    budget = read_budget()
    assert budget.keys() == {f"{call}, {way}" for call in CALLS for way in WAYS}
    assert all(each.of("client") > 0 < each.of("server") for each in budget.values())
    assert len(table(budget)) == len(budget) + 2


@pytest.mark.parametrize("call", CALLS)
def test_every_call_can_be_repeated(client: gradserve.Client, call: str) -> None:
    make, prepare = call_on(client, f"costs-{call}", call)
    for _ in range(3):
        prepare()
        make()
