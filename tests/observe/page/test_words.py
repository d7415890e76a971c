"""What the status page says about rounds, and how it writes numbers."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from playwright.async_api import Page

from gradserve_protocol.server_status import AccumulatorStatus, ArrivalStatus, RoundStatus

pytestmark = pytest.mark.asyncio(loop_scope="session")

_SENTENCES = """async cases => {
    const { analyse } = await import(new URL("rounds.js", location.href));
    const { verdict } = await import(new URL("verdict.js", location.href));
    return cases.map(([one, uptime]) => verdict(one, analyse(one.rounds, one.missing, uptime)));
}"""

_COMPARED = """async cases => {
    const { comparison } = await import(new URL("verdict.js", location.href));
    return cases.map(one => comparison(one) ?? null);
}"""


def ended(step: int, **after: float) -> RoundStatus:
    """A round of a second, one every 1.5 s; gradients after its end were too late."""
    arrivals = tuple(ArrivalStatus(worker, at, stale=at > 1) for worker, at in after.items())
    return RoundStatus(step, 1.5 * step, 1.5 * step + 1, 3, arrivals)


def net(*rounds: RoundStatus, missing: tuple[str, ...] = (), num_waiting: int = 1) -> AccumulatorStatus:
    median = 1.0 if len(rounds) > 1 else 0.0
    return AccumulatorStatus(
        "default", "net", rounds=rounds, missing=missing, num_waiting=num_waiting, median_round_seconds=median
    )


def _two(*, last_of_20: int) -> list[RoundStatus]:
    """Rounds of two equal workers, of which b is last in the first so many of 20 rounds, and a in the rest."""
    return [ended(at + 1, **({"a": 0, "b": 0.6} if at < last_of_20 else {"b": 0, "a": 0.6})) for at in range(20)]


_OPEN = RoundStatus(4, 40.0, 0.0, 3, (ArrivalStatus("a"),))
_EVEN = [ended(1, a=0, b=0.5, c=0.6), ended(2, b=0, c=0.5, a=0.6), ended(3, c=0, a=0.5, b=0.6)]


_VERDICTS: list[tuple[AccumulatorStatus, float, str, bool]] = [
    (net(), 50.0, "No round has ended yet, or none lately.", False),
    (net(_OPEN), 40.5, "The first round is open.", False),
    (net(*_EVEN), 50.0, "No worker stands out in the last 3 rounds.", False),
    (net(*_EVEN, _OPEN, missing=("b",)), 42.5, "No worker stands out in the last 3 rounds.", False),
    (
        net(*_EVEN, _OPEN, missing=("b", "c")), 60.0,
        "The open round has lasted 20.0 s, while others took 1.00 s: not here yet are b and c.", True,
    ),
    (net(*_EVEN, _OPEN, missing=("b",), num_waiting=0), 60.0, "No worker stands out in the last 3 rounds.", False),
    (
        net(*[ended(step, a=0, b=0.1, slow=0.9) for step in range(1, 6)]), 50.0,
        "slow holds the others up: it came last in 5 of 5 rounds, which waited 800 ms each for it alone.", True,
    ),
    (
        net(*[ended(step, a=0, slow=0.9) for step in range(1, 21)]), 50.0,
        "slow holds the others up: it came last in 20 of 20 rounds, which waited 900 ms each for it alone.", True,
    ),
    # Two equal workers: by chance, one is last in more rounds than the other, or always by little.
    (net(*_two(last_of_20=11)), 50.0, "No worker stands out in the last 20 rounds.", False),
    (net(*_two(last_of_20=15)), 50.0, "No worker stands out in the last 20 rounds.", False),
    (net(*_two(last_of_20=3)[:3]), 50.0, "No worker stands out in the last 3 rounds.", False),
    (net(*[ended(step, a=0, b=0.1) for step in range(20)]), 50.0, "No worker stands out in the last 20 rounds.", False),
    (
        net(_EVEN[0], *[ended(step, a=0, b=0.1, c=0.2, late=1.5) for step in (2, 3)]), 50.0,
        "late is often missing or too late: the rounds end without it.", True,
    ),
]  # fmt: skip


async def test_a_sentence_says_who_holds_the_rounds_up(page: Page) -> None:
    cases = [[asdict(accumulator), uptime] for accumulator, uptime, *_ in _VERDICTS]
    written = await page.evaluate(_SENTENCES, cases)
    assert written == [{"text": text, "alarming": alarming} for *_, text, alarming in _VERDICTS]


_COMPARISONS: list[tuple[AccumulatorStatus, str | None, bool]] = [
    (net(), None, False),
    (replace(net(), num_compared=8), "Weights equal on 8 workers at step 0.", False),
    (replace(net(), num_compared=8, compared_step=1200), "Weights equal on 8 workers at step 1,200.", False),
    (
        replace(net(), num_compared=3, compared_step=9, different={"b": 7}, different_since={"b": 8}),
        "Weights differ on 1 of 3 workers at step 9: b since step 8 (equal at step 7 at last).", True,
    ),
    (
        replace(
            net(), num_compared=9, compared_step=9, different=dict.fromkeys("abcde", -1),
            different_since={"a": 0, "b": 1, "c": 2, "d": 3, "e": 4},
        ),
        "Weights differ on 5 of 9 workers at step 9: a since step 0, b since step 1, c since step 2, 2 others.", True,
    ),
]  # fmt: skip


async def test_a_sentence_says_whether_weights_are_equal(page: Page) -> None:
    written = await page.evaluate(_COMPARED, [asdict(accumulator) for accumulator, *_ in _COMPARISONS])
    assert written == [None if text is None else {"text": text, "alarming": alarm} for _, text, alarm in _COMPARISONS]


async def test_numbers_have_three_digits_and_a_unit(page: Page) -> None:
    cases: list[tuple[str, list[Any], str]] = [
        ("bytes", [999], "999 B"), ("bytes", [1_234_567], "1.23 MB"), ("bytes", [45_600_000_000], "45.6 GB"),
        ("seconds", [0], "0 s"), ("seconds", [0.00042], "420 µs"), ("seconds", [0.0042], "4.2 ms"),
        ("seconds", [0.42], "420 ms"), ("seconds", [4.2], "4.20 s"), ("seconds", [125], "2 min 5 s"),
        ("seconds", [11_040], "3 h 4 min"), ("seconds", [172_800], "2 d"), ("rate", [0.001], "<0.01"),
        ("rate", [12.34], "12.3"), ("count", [1_234_567], "1,234,567"), ("count", [123_456_789], "123 M"),
        ("ago", [0.4], "now"), ("ago", [59.9], "59 s ago"), ("plural", [1, "round"], "1 round"),
        ("plural", [2, "round"], "2 rounds"), ("ends", ["worker-of-rack-7-slot-12", 12], "worke…lot-12"),
    ]  # fmt: skip
    written = await page.evaluate(
        """async cases => {
            const format = await import(new URL("format.js", location.href));
            return cases.map(([name, values]) => format[name](...values));
        }""",
        [case[:2] for case in cases],
    )
    assert written == [case[2] for case in cases]
