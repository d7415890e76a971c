"""Every sample counts exactly once per epoch, however workers come, die, are late and return."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradserve.data import Sampler, sampler
from gradserve.data.blocks import samples_at
from tests.data.registry import Registry, begun

_MOST_ALONE = 200
"""The steps in which one worker takes what others have left: they were at most as many blocks ahead as had come."""
FATES = st.sampled_from(["counts", "late", "dies", "returns"])


@settings(max_examples=40)
@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    per_step=st.integers(1, 3),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 5), FATES), max_size=6), max_size=16),
)
def test_each_sample_counts_once_per_epoch(
    num_samples: int, batch_size: int, per_step: int, rounds: list[list[tuple[int, str]]]
) -> None:
    """Six workers and a seventh, which is in every round. Those that a round names take batches in it."""
    seats, counts = Registry(), Counter[int](range(num_samples))

    def new() -> Sampler:
        return sampler(num_samples, seed=1, batch_size=batch_size, batches_per_step=per_step)

    keeper = begun(new(), seats, "keeper")
    workers, ids = {"keeper": keeper}, {"keeper": "keeper"}

    def train(fates: dict[str, str]) -> None:
        members = []
        for name, fate in fates.items():
            if name not in workers or fate == "returns":  # with another id, and the state of one that is there
                workers[name] = new()
                workers[name].load_state_dict(keeper.state_dict())
                ids[name] = f"{name}-{len(seats.worker_ids)}"
                begun(workers[name], seats, ids[name])
            batches = iter(workers[name])
            taken = [each for _ in range(per_step) for each in next(batches)]
            workers[name].use()
            if fate in ("counts", "returns"):
                members.append(ids[name])
                counts.update(taken)
            if fate == "dies":
                del workers[name]
        for worker in workers.values():
            worker.advance(members)

    for fates in rounds:
        train({"keeper": "counts"} | {f"w{number}": fate for number, fate in fates})
        assert {str(each.state_dict()) for each in workers.values()} == {str(keeper.state_dict())}
    for _ in range(_MOST_ALONE):
        if keeper.state_dict()["ahead"]:
            train({"keeper": "counts"})
    counts.subtract(range(num_samples))
    assert counts.total() == keeper.num_counted
    assert not keeper.state_dict()["ahead"]
    # Nothing is left out before something later: no sample counted more than once in the epoch that has not ended.
    assert {count - keeper.epoch for count in counts.values()} <= {0, 1}


@pytest.mark.parametrize("num_samples", [1, 2, 3, 64, 65, 1000])
def test_orders_are_permutations(num_samples: int) -> None:
    places = np.arange(num_samples, dtype=np.uint64)
    orders = [samples_at(places, num_samples, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert [sorted(each) for each in orders] == [list(places)] * 3
    if num_samples >= 64:
        assert len({tuple(each) for each in orders}) == 3


def test_the_order_stays_what_it_was() -> None:
    """A worker with another version of gradserve or NumPy may join, and a checkpoint may be old."""
    places = np.arange(4, dtype=np.uint64)
    assert samples_at(places, 10_000_000, 7, 3).tolist() == [5525136, 7312140, 2408652, 9095173]
    assert samples_at(places, 4, 0, 0).tolist() == [1, 3, 2, 0]


def test_all_orders_of_few_samples_are_equally_likely() -> None:
    places = np.arange(4, dtype=np.uint64)
    found = Counter(tuple(samples_at(places, 4, seed, 0)) for seed in range(960))
    assert len(found) == 24
    assert sum((count - 40) ** 2 / 40 for count in found.values()) < 50  # chi-square, 23 degrees of freedom
