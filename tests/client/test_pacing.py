"""Calls are held back while so many are on their way that one could be overtaken by more than a server remembers."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import gradserve.aio
from gradserve.calls.identity import (
    ARRIVED_SECONDS,
    MOST_CALLS,
    MOST_ON_ONE_CONNECTION,
    SURELY_ARRIVED_SECONDS,
    Pacing,
)
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP

KEY = ("accumulator", "default", "net")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pacing(clock: Clock) -> Pacing:
    return Pacing(clock)


@pytest.fixture
def sent(pacing: Pacing) -> Iterator[list[ExitStack]]:
    """As many calls as may be on their way, each to be ended."""
    stacks = [ExitStack() for _ in range(MOST_CALLS)]
    for each in stacks:
        assert not is_held(pacing)
        each.enter_context(pacing.sent(KEY))
    yield stacks
    for each in stacks:
        each.close()


def is_held(pacing: Pacing, accumulator: tuple[str, ...] = KEY, *, waits: bool = True) -> bool:
    """Returns True if a call would be held back, which gives up then."""
    turn = pacing.turn(accumulator, waits=waits)
    held = next(turn, None) is not None
    turn.close()
    return held


def test_those_that_come_after_the_earliest_without_an_answer(pacing: Pacing, sent: list[ExitStack]) -> None:
    assert is_held(pacing)
    assert not is_held(pacing, ("accumulator", "default", "other"))
    for each in sent[1:]:
        each.close()
    assert is_held(pacing), "the first could be overtaken by all that are sent now"
    sent[0].close()
    assert not is_held(pacing)


def test_those_that_take_one_connection(pacing: Pacing) -> None:
    with ExitStack() as sent:
        for _ in range(MOST_ON_ONE_CONNECTION):
            assert not is_held(pacing, waits=False)
            sent.enter_context(pacing.sent(KEY))
        assert is_held(pacing, waits=False)
        assert not is_held(pacing)


def test_what_waits_for_long_has_arrived(pacing: Pacing, sent: list[ExitStack], clock: Clock) -> None:
    """A round may need more gradients of one client than are sent at once."""
    turn = pacing.turn(KEY, waits=True)
    assert next(turn, None) is not None
    clock.now = ARRIVED_SECONDS
    assert next(turn, None) is None
    assert not is_held(pacing)


def test_a_slow_server_that_answers_others_may_have_to_come_to_it_yet(
    pacing: Pacing, sent: list[ExitStack], clock: Clock
) -> None:
    clock.now = 0.9 * SURELY_ARRIVED_SECONDS
    sent[1].close()
    assert is_held(pacing)
    clock.now += ARRIVED_SECONDS
    assert not is_held(pacing)


def test_what_waits_for_very_long_has_arrived_although_others_are_answered(
    pacing: Pacing, sent: list[ExitStack], clock: Clock
) -> None:
    clock.now = SURELY_ARRIVED_SECONDS
    sent[1].close()
    assert not is_held(pacing)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["grpc", "shared_memory"])
@pytest.mark.parametrize("kind", ["applies", "push_pulls of as many rounds", "push_pulls of one round"])
async def test_more_calls_at_once_than_a_server_remembers(kind: str, way: Any) -> None:
    number = 2500
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        async with gradserve.aio.connect(server.address, timeout=PATIENCE_SECONDS, transport=way) as client:
            acc = await client.gradient_accumulator({"w": [0.0]}, shared_name="net")

            async def call(index: int) -> str:
                grads = {"w": [float(index)]}
                if kind == "applies":
                    return (await acc.apply_grad(grads)).outcome.name
                num_required = 1 if "rounds" in kind else number
                return (await acc.push_pull(grads, num_required, 1 << 40, worker_id=str(index))).outcome.name

            outcomes = await asyncio.gather(*map(call, range(number)), return_exceptions=True)
            assert Counter(map(repr, outcomes)) == {"'ACCEPTED'": number}
            if kind == "applies":
                assert float((await acc.take_grad(1))["w"][0]) == pytest.approx((number - 1) / 2)
