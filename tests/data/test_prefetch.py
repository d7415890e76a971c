"""Batches that are loaded ahead are those that come next, whatever happens to the workers of the run."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradserve
from gradserve.data import Batches, Prefetched, sampler, stream
from tests.data.registry import Registry, begun

NUM_SAMPLES = 13


class Ahead:
    """A loader that has read some lists more than it has returned, as a DataLoader does."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.read: list[list[int]] = []
        self.num_opened = 0

    def __call__(self, lists: Iterable[list[int]]) -> Iterator[tuple[int, ...]]:
        self.num_opened += 1
        waiting = deque[list[int]]()
        for each in lists:
            self.read.append(each)
            waiting.append(each)
            if len(waiting) > self.depth:
                yield tuple(waiting.popleft())


def of_stream(per_step: int) -> Batches[int]:
    return stream(lambda _epoch: range(NUM_SAMPLES), batch_size=2, batches_per_step=per_step)


def of_dataset(per_step: int) -> Batches[int]:
    return sampler(NUM_SAMPLES, seed=2, batch_size=2, batches_per_step=per_step)


@pytest.mark.parametrize("make", [of_dataset, of_stream])
@settings(max_examples=60)
@given(
    per_step=st.integers(1, 3),
    depth=st.integers(0, 5),
    rounds=st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.sampled_from(["", "fails", "left"])), max_size=16),
)
def test_they_are_those_that_come_next(
    make: Callable[[int], Batches[int]], per_step: int, depth: int, rounds: list[tuple[set[str], str]]
) -> None:
    """Beside batches that are not loaded ahead, of the same worker of four; steps fail, and loops are left."""
    seats = Registry()
    plain, batches = begun(make(per_step), seats, "a"), begun(make(per_step), seats, "a")
    for other in "bcd":
        begun(make(per_step), seats, other)
    prefetched: Prefetched[int, tuple[int, ...]] = batches.prefetch(Ahead(depth))

    def take(number: int) -> None:
        first, second = [*islice(plain, number)], [*islice(prefetched, number)]
        assert [tuple(each) for each in first] == second

    for members, fate in rounds:
        if fate == "left":
            take(1)
        take(per_step)
        for each in (plain, batches):
            each.use()
        if fate != "fails":
            for each in (plain, batches):
                each.advance(members)
        assert plain.epoch == batches.epoch


def test_nothing_is_loaded_for_nothing_while_the_same_workers_stay() -> None:
    seats, loader = Registry(), Ahead(4)
    batches = begun(of_dataset(2), seats, "a")
    begun(of_dataset(2), seats, "b")
    batches.advance("ab")
    taken = []
    prefetched = batches.prefetch(loader)
    while batches.epoch < 3:
        for each in prefetched:
            taken.append(list(each))
            if len(taken) % 2 == 0:
                batches.use()
                batches.advance("ab")
    assert loader.read[: len(taken)] == taken
    assert len(loader.read) == len(taken) + loader.depth
    assert loader.num_opened == 1, "for all epochs"


def test_what_counts_is_what_was_trained_with_not_what_was_loaded() -> None:
    batches = begun(of_dataset(1), Registry(), "a")
    loader = Ahead(6)
    next(iter(batches.prefetch(loader)))
    assert len(loader.read) == 7
    assert (batches.num_counted, batches.state_dict()["ahead"]) == (0, [])
    batches.use()
    batches.advance("a")
    assert batches.num_counted == 2


def test_a_loader_that_fails_is_opened_again() -> None:
    def load(lists: Iterable[list[int]]) -> Iterator[list[int]]:
        opened.append(True)
        for each in lists:
            if len(opened) == 1:
                raise OSError("no such file")
            yield each

    opened: list[bool] = []
    batches = begun(of_dataset(1), Registry(), "a")
    prefetched = batches.prefetch(load)
    with pytest.raises(OSError, match="no such file"):
        next(iter(prefetched))
    assert next(iter(prefetched)) == next(iter(batches))


@pytest.mark.parametrize(
    ("load", "says"),
    [
        pytest.param(lambda lists: islice(lists, 0), "one whose items end", id="one that ends"),
        pytest.param(lambda _lists: iter([1]), "one that returns more", id="one that reads nothing"),
        pytest.param(
            lambda _lists: 5, "a function that returns an iterable for load, got 5", id="one that returns none"
        ),
        pytest.param([1], "a function that returns what is loaded", id="no function"),
    ],
)
def test_mistakes(load: Any, says: str) -> None:
    batches = begun(of_dataset(1), Registry(), "a")
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        next(iter(batches.prefetch(load)))
    assert says in str(error.value)
    assert error.value.field == "load"
