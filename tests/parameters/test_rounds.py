"""Rounds of parameters: updates, versions, weights, staleness, the end of a round."""

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import DeadlineExceededError, InvalidArgumentError, OutOfRangeError
from gradserve_server.parameters.reductions.spec import Krum, Mean, Median, Sum
from gradserve_server.parameters.round_rules import PolynomialDiscount, Staleness
from gradserve_server.parameters.spec import Normalization, UpdateKind
from tests.parameters.bench import ParametersBench, adam, opened, push, sgd, shown


@pytest.fixture
def bench() -> ParametersBench:
    return ParametersBench()


async def test_sgd_of_deltas_is_the_weighted_mean_of_the_workers_parameters(bench: ParametersBench) -> None:
    made = await bench.parameters({"w": [10, 20]}, rounds={"num_required": 2})
    await push(made, {"w": [3, 0]}, worker_id="a", weight=3)
    await push(made, {"w": [-1, 8]}, worker_id="b", weight=1)
    version = await made.read(None, 0)
    assert (version.step, shown(version)) == (1, {"w": [12, 22]})
    assert (version.num_gradients, version.total_weight, version.worker_ids) == (2, 4, ("a", "b"))


async def test_gradients_are_subtracted(bench: ParametersBench) -> None:
    made = await bench.parameters({"w": [10, 20]}, update=UpdateKind.GRADIENT, optimizer=sgd(lr=0.5))
    await push(made, {"w": [2, 4]})
    assert shown(await made.read(None, 0)) == {"w": [9, 18]}


async def test_versions_are_kept_and_waited_for(bench: ParametersBench) -> None:
    made = await bench.parameters(keep_versions=2)
    waiting = asyncio.ensure_future(made.read(2, None))
    for step in range(3):
        await push(made, {"w": [1, 1]}, step)
    assert shown(await waiting) == {"w": [2, 2]}
    assert made.state.kept_steps == (2, 3)
    with pytest.raises(OutOfRangeError, match="kept steps"):
        await made.read(1, None)


async def test_push_pull_returns_the_version_of_its_round(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 2})
    pulls = [
        made.push_pull(None, Contribution(worker_id=name), opened({"w": [value, 0]}), 5)
        for name, value in (("a", 2), ("b", 4))
    ]
    answers = await asyncio.gather(*pulls)
    assert [(pushed.outcome, shown(version)["w"], again) for pushed, version, again in answers] == [
        (Outcome.ACCEPTED, [3, 0], False)
    ] * 2


async def test_a_worker_counts_once_a_round(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 2})
    outcomes = [(await push(made, {"w": [value, 0]}, worker_id="a")).outcome for value in (1, 5)]
    await push(made, {"w": [3, 0]}, worker_id="b")
    assert outcomes == [Outcome.ACCEPTED, Outcome.ALREADY_COUNTED]
    assert shown(await made.read(None, 0)) == {"w": [2, 0]}


async def test_a_repeated_call_gets_its_first_answer_after_its_round(bench: ParametersBench) -> None:
    made = await bench.parameters()
    call = RequestId("client", 1, b"content")
    first = await push(made, {"w": [1, 0]}, call=call, weight=2.0)
    for _ in range(3):
        await push(made, {"w": [1, 0]})
    again, duplicate = await made.push(call, Contribution(local_step=0, weight=2.0), opened({"w": [1, 0]}))
    assert (again, duplicate) == (first, True)
    assert (again.weight, again.staleness, again.global_step) == (2.0, 0, 0)


async def test_stale_updates_count_less_or_not_at_all(bench: ParametersBench) -> None:
    made = await bench.parameters(staleness=Staleness(2, PolynomialDiscount(0.5)), rounds={"num_required": 1})
    for _ in range(3):
        await push(made, {"w": [0, 0]})
    made_of = [await push(made, {"w": [0, 0]}, local_step) for local_step in (0, 1, 4)]
    assert [(each.outcome, each.staleness) for each in made_of] == [
        (Outcome.STALE, 3),
        (Outcome.ACCEPTED, 2),
        (Outcome.ACCEPTED, 0),
    ]
    assert [each.weight for each in made_of] == [0, pytest.approx(3**-0.5), 1]
    weights = made.state.weights
    assert weights.accepted == weights.applied + weights.pending
    assert weights.refused == {"stale": 1.0}


async def test_an_update_of_the_future_is_an_error(bench: ParametersBench) -> None:
    made = await bench.parameters()
    with pytest.raises(InvalidArgumentError, match="local_step of at most 0"):
        await push(made, {"w": [0, 0]}, 1)
    assert made.state.num_updates == 0


async def test_absent_components_keep_their_value_and_their_state(bench: ParametersBench) -> None:
    made = await bench.parameters(
        {"w": [0, 0], "b": [5]}, optimizer=sgd(lr=1.0, momentum=0.5), update=UpdateKind.GRADIENT
    )
    await push(made, {"w": [1, 1], "b": [1]})
    await push(made, {"w": [0, 0]})
    await push(made, {"b": [0]})
    assert shown(await made.read(None, 0)) == {"w": [-1.5, -1.5], "b": [3.5]}


async def test_a_component_is_the_mean_of_the_updates_that_have_it(bench: ParametersBench) -> None:
    made = await bench.parameters({"w": [0, 0], "b": [0]}, rounds={"num_required": 2})
    await push(made, {"w": [2, 2], "b": [6]}, worker_id="a", weight=3)
    await push(made, {"w": [6, 6]}, worker_id="b")
    assert shown(await made.read(None, 0)) == {"w": [3, 3], "b": [6]}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"reduction": Mean()}, 3),
        ({"reduction": Sum()}, 12),
        ({"normalization": Normalization.COUNT}, 4),
        ({"reduction": Median()}, 2),
        ({"clip_norm": 1.0}, 1),
        ({"reduction": Krum(0)}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
async def test_reductions(bench: ParametersBench, spec: dict[str, Any], expected: float, deterministic: bool) -> None:
    made = await bench.parameters(rounds={"num_required": 3}, deterministic=deterministic, **spec)
    for worker_id, value, weight in (("a", 2, 2), ("b", 2, 1), ("c", 6, 1)):
        await push(made, {"w": [value, 0]}, worker_id=worker_id, weight=weight)
    assert shown(await made.read(None, 0)) == {"w": pytest.approx([expected, 0])}


async def test_grace_waits_for_latecomers(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 1, "grace": 0.03125})
    pull = asyncio.ensure_future(made.push_pull(None, Contribution(worker_id="a"), opened({"w": [2, 0]}), None))
    await asyncio.sleep(0)
    await push(made, {"w": [4, 0]}, worker_id="b")
    assert made.state.step == 0
    bench.now += 0.03125
    _, version, _ = await pull
    assert shown(version) == {"w": [3, 0]}
    assert made.records(0, 10)[0][0].reason == "grace"


async def test_a_worker_that_has_waited_for_long_is_expected_in_the_next_round(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 1, "expected": "alive", "grace": 100.0})

    def push_pull(worker_id: str, number: int) -> asyncio.Task[Any]:
        contribution = Contribution(local_step=made.state.step, worker_id=worker_id)
        update = opened({"w": [1, 1]})
        return asyncio.create_task(made.push_pull(RequestId(worker_id, number), contribution, update, None))

    first = [push_pull(worker_id, 1) for worker_id in "ab"]
    await asyncio.sleep(0)
    bench.now += 100
    made.go_on()
    await asyncio.gather(*first)
    bench.now += 1
    second = [push_pull("a", 2)]
    await asyncio.sleep(0)
    assert (made.state.step, made.state.worker_ids) == (1, ("a",))
    second.append(push_pull("b", 2))
    await asyncio.gather(*second)
    assert made.records(1, 1)[0][0].reason == "expected"


async def test_a_deadline_with_too_few_updates_fails_the_waiting(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 3, "min_required": 2, "deadline": 0.03125})
    pull = asyncio.ensure_future(made.push_pull(None, Contribution(worker_id="a"), opened({"w": [2, 0]}), None))
    await asyncio.sleep(0)
    bench.now += 0.03125
    with pytest.raises(DeadlineExceededError, match=r"2 updates that it needs .* 1 are in, of workers 'a'"):
        await pull
    await push(made, {"w": [4, 0]}, worker_id="b")
    assert (made.state.num_updates, made.state.step) == (2, 0)
    bench.now += 0.03125
    assert shown(await made.read(1, None)) == {"w": [3, 0]}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
async def test_rounding_of_16_bits_does_not_accumulate(bench: ParametersBench, dtype: type) -> None:
    made = await bench.parameters({"w": np.array([1, 1], dtype)}, optimizer=sgd(lr=2.0**-14))
    for _ in range(64):
        await push(made, {"w": np.array([1, 2], dtype)})
    expected = np.array([1 + 2**-8, 1 + 2**-7]).astype(dtype).astype(float)
    assert shown(await made.read(None, 0)) == {"w": expected.tolist()}


async def test_records_form_a_chain(bench: ParametersBench) -> None:
    made = await bench.parameters(optimizer=adam(lr=0.5))
    first = await made.read(None, 0)
    for value in (1, 2):
        await push(made, {"w": [value, 0]}, worker_id="a", weight=2.0)
    (one, two), has_more = made.records(0, 10)
    assert (one.digest_before, one.digest_after, two.digest_after) == (
        first.digest,
        two.digest_before,
        made.state.digest,
    )
    assert [one.hash, two.hash] == [one.chained(bytes(32)).hash, two.chained(one.hash).hash]
    assert one.updates[0].weight == 2.0
    assert (one.step, one.lr, has_more) == (1, 0.5, False)
