"""Workers whose parameters have come to differ are found, and told."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.training.agreement import WeightsCheck
from tests.training.replicas import Replica, have_equal_weights


def replicas(client: gradserve.Client, name: str, number: int, **options: Any) -> list[Replica]:
    """Workers that compare at every second step."""
    made: list[Replica] = []
    for index in range(number):
        compared = {"compare_every": 2, "compared": lambda index=index: {"w": made[index].weights}}
        made.append(Replica(client, name, f"w{index}", number, **{**compared, **options}))
    return [each.begin() for each in made]


def step(workers: list[Replica]) -> list[BaseException | None]:
    with ThreadPoolExecutor(len(workers)) as threads:
        return [each.exception() for each in [threads.submit(worker.train) for worker in workers]]


@pytest.mark.parametrize("options", [{}, {"missing": "zeros"}, {"deterministic": True}], ids=str)
def test_the_one_that_differs_is_told(
    client: gradserve.Client, name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    workers = replicas(client, name, 3, **options)
    for _ in range(5):
        assert step(workers) == [None] * 3
    assert have_equal_weights(*workers)
    workers[1].weights = workers[1].weights + np.float32(1e-3)
    assert step(workers) == [None] * 3  # a step at which nothing is compared: 5
    caplog.set_level(logging.WARNING, "gradserve.training")
    first, other, last = step(workers)
    assert (first, last) == (None, None)
    assert isinstance(other, gradserve.AbortedError)
    assert f"at step 6 of training run {name!r}, worker 'w1' has other parameters than most of its 3" in str(other)
    assert "equal at step 4" in str(other)
    logged = [each.message for each in caplog.records if each.name.startswith("gradserve.training")]
    assert len(logged) == 2
    assert all("other parameters than most: 'w1' (equal at step 4)" in each for each in logged)
    for each in workers:
        each.worker.close()


def test_of_two_the_first_is_taken_for_right(client: gradserve.Client, name: str) -> None:
    workers = replicas(client, name, 2)
    workers[1].weights = workers[1].weights + np.float32(1)
    failures = step(workers)
    assert sorted(map(type, failures), key=str) == sorted([gradserve.AbortedError, type(None)], key=str)
    assert "never equal so far" in str(next(each for each in failures if each is not None))
    for each in workers:
        each.worker.close()


def test_by_default_a_difference_is_logged(
    client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At every tenth step; once, and again when it is over."""
    caplog.set_level(logging.INFO, "gradserve.training")
    workers = replicas(client, name, 2, compare_every=None)
    right = workers[1].weights
    workers[1].weights = right + np.float32(1)
    said: list[list[str]] = []
    for number in range(31):
        if number == 15:
            workers[1].weights = workers[0].weights
        caplog.clear()
        assert step(workers) == [None, None]
        logged = [each.message for each in caplog.records if "parameters" in each.message and "train" in each.name]
        said += [[str(number), *logged]] if logged else []
    numbers = [int(each[0]) for each in said]
    assert numbers == [0, 20]
    assert all("other parameters than most: 'w" in each for each in said[0][1:])
    assert all("equal parameters again" in each for each in said[1][1:])
    for each in workers:
        each.worker.close()


@pytest.mark.parametrize(
    ("shape", "every"), [((4,), 10), ((40 << 18,), 10), ((50 << 18, 4), 50), ((1 << 20, 1 << 12), 1000)], ids=str
)
def test_how_often_large_parameters_are_compared(shape: tuple[int, ...], every: int) -> None:
    spec = gradserve.DenseSpec("float32", shape)
    check = WeightsCheck.of("net", "w", None, dict, [spec])
    assert check is not None
    assert [step for step in range(1, every + 1) if check.compares_at(step)] == [every]


def test_parameters_that_are_not_at_hand(client: gradserve.Client, name: str) -> None:
    assert WeightsCheck("net", "w", 1, lambda: None, is_strict=True).to_send(4) is None


def test_averages_have_parameters_alone(client: gradserve.Client, name: str) -> None:
    (worker,) = replicas(client, name, 1)
    (average,) = worker.train().averages
    assert list(average) == ["w"]
    worker.worker.close()


@pytest.mark.parametrize("options", [{"compare_every": -1}, {"compare_every": 2, "compared": None}], ids=str)
def test_options_that_cannot_be(client: gradserve.Client, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="compare_every"):
        replicas(client, name, 1, **options)
