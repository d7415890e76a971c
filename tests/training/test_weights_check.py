"""Workers whose parameters have come to differ are found, and told."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.training.extra_components import DIGESTS, WeightsCheck
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
    caplog.set_level(logging.ERROR, "gradserve.training")
    first, other, last = step(workers)
    assert (first, last) == (None, None)
    assert isinstance(other, gradserve.AbortedError)
    assert f"at step 6 of training run {name!r}, worker 'w1' has other parameters than 67% of the round" in str(other)
    assert "they were equal at step 4" in str(other)
    assert len(caplog.records) == 2
    assert all("33 % of the round had other parameters" in each.message for each in caplog.records)
    for each in workers:
        each.worker.close()


def test_of_two_neither_is_right(client: gradserve.Client, name: str) -> None:
    workers = replicas(client, name, 2)
    workers[1].weights = workers[1].weights + np.float32(1)
    failures = step(workers)
    assert all(isinstance(each, gradserve.AbortedError) and "not been equal since" in str(each) for each in failures)
    for each in workers:
        each.worker.close()


def test_parameters_that_are_not_at_hand(client: gradserve.Client, name: str) -> None:
    check = WeightsCheck("net", "w", 1, lambda: None)
    sent = check.to_send(4)
    assert not sent.any()
    check.check(4, {DIGESTS: np.ones_like(sent)})


def test_averages_have_parameters_alone(client: gradserve.Client, name: str) -> None:
    (worker,) = replicas(client, name, 1)
    (average,) = worker.train().averages
    assert list(average) == ["w"]
    worker.worker.close()


@pytest.mark.parametrize("options", [{"compare_every": -1}, {"compare_every": 2, "compared": None}], ids=str)
def test_options_that_cannot_be(client: gradserve.Client, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="compare_every"):
        replicas(client, name, 1, **options)


def test_all_workers_compare_alike(client: gradserve.Client, name: str) -> None:
    (worker,) = replicas(client, name, 1)
    with pytest.raises(gradserve.AlreadyExistsError) as raised:
        Replica(client, name, "other", 1)
    assert "compare_every" in raised.value.__notes__[0]
    worker.worker.close()
