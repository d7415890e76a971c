"""Every update counts once, however often it is sent, and whenever."""

import random

import numpy as np

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.reductions.spec import Sum
from tests.parameters.bench import ParametersBench, opened, push

NUM_UPDATES = 10_000
NUM_WORKERS = 16
PER_ROUND = 100
UPDATES = np.random.default_rng(11).normal(size=(NUM_UPDATES, 3)).astype(np.float32)


async def parameters(bench: ParametersBench) -> Parameters:
    return await bench.parameters(
        {"w": np.zeros(3, np.float32)},
        reduction=Sum(),
        rounds={"num_required": PER_ROUND},
        one_per_worker=False,
        keep_rounds=NUM_UPDATES,
    )


def how(number: int, step: int) -> tuple[RequestId, Contribution]:
    """Returns the call of an update: one of a worker's, one after the other."""
    worker, sequence = number % NUM_WORKERS, number // NUM_WORKERS
    contribution = Contribution(step, weight=1.0 + number % 7, worker_id=f"w{worker}", sequence=sequence)
    return RequestId(f"client{worker}", sequence, number.to_bytes(4)), contribution


async def test_updates_that_are_sent_up_to_four_times_give_the_same_bits() -> None:
    chance = random.Random(3)
    once, often = [await parameters(ParametersBench()) for _ in range(2)]
    for number, update in enumerate(UPDATES):
        step = number // PER_ROUND
        await push(once, {"w": update}, step, weight=1.0 + number % 7, worker_id=f"w{number % NUM_WORKERS}")
    num_repeats, to_repeat, first = 0, [], {}
    for number, update in enumerate(UPDATES):
        call, contribution = how(number, number // PER_ROUND)
        first[number], duplicate = await often.push(call, contribution, opened({"w": update}))
        assert (first[number].outcome, duplicate) == (Outcome.ACCEPTED, False)
        to_repeat += [number] * chance.randrange(4)
        while to_repeat and chance.random() < 0.7:
            again = to_repeat.pop(chance.randrange(len(to_repeat)))
            answer, duplicate = await often.push(*how(again, again // PER_ROUND), opened({"w": UPDATES[again]}))
            assert (answer, duplicate) == (first[again], True)
            num_repeats += 1
    assert num_repeats > NUM_UPDATES // 2
    assert often.state.step == once.state.step == NUM_UPDATES // PER_ROUND
    digests = [[each.digest_after for each in made.records(0, NUM_UPDATES)[0]] for made in (once, often)]
    assert digests[0] == digests[1]
    total = float(sum(1 + number % 7 for number in range(NUM_UPDATES)))
    assert (often.state.weights.accepted, often.state.weights.applied, often.state.weights.refused) == (
        total,
        total,
        {},
    )
