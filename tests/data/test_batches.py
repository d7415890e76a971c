"""Batches of datasets and streams: when they can be taken, what comes again, states, and mistakes."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

import pytest

import gradserve
from gradserve.data import Batches, Sampler, sampler, stream
from gradserve.training import State, Worker
from tests.data.registry import Registry, begun


def in_order(**options: Any) -> Sampler:
    return sampler(**{"dataset": 10, "seed": 0, "batch_size": 2, "shuffle": False} | options)


class TestTaking:
    def test_the_batches_of_an_epoch_end_with_it(self) -> None:
        batches = begun(in_order(dataset=5), Registry(), "a")
        epochs: list[list[list[int]]] = []
        for _ in range(3):
            epochs.append([])
            for batch in batches:
                epochs[-1].append(batch)
                batches.use()
                batches.advance(["a"])
        assert epochs == [[[0, 1], [2, 3], [4, 0]], [[1, 2], [3, 4]], [[0, 1], [2, 3], [4, 0]]]
        assert (batches.epoch, batches.step, batches.num_counted) == (3, 8, 16)

    def test_batches_come_again_until_they_have_counted(self) -> None:
        seats = Registry()
        batches = begun(in_order(batches_per_step=2), seats, "a")
        begun(in_order(batches_per_step=2), seats, "b")
        taken = iter(batches)
        assert [next(taken), next(taken)] == [[0, 1], [2, 3]]
        batches.use()
        assert [next(taken), next(taken)] == [[0, 1], [2, 3]], "the step has failed"
        assert next(iter(batches)) == [0, 1], "the loop was left"
        batches.advance(["b"])  # whose batches were [4, 5] and [6, 7]
        assert [*islice(batches, 2)] == [[8, 9], [0, 1]], "behind the block of b, which was in the last round"
        batches.use()
        batches.advance(["a", "b"])
        assert batches.num_counted == 12

    def test_more_than_one_step_needs_is_refused(self) -> None:
        taken = iter(begun(in_order(), Registry(), "a"))
        next(taken)
        with pytest.raises(gradserve.InvalidArgumentError, match="let `prefetch` make it"):
            next(taken)


class Lines:
    """A stream that says how often it was opened."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths
        self.opened: list[int] = []

    def __call__(self, epoch: int) -> Iterator[int]:
        self.opened.append(epoch)
        return iter(range(self.lengths.get(epoch, 7)))


def test_a_stream_gives_the_batches_of_a_dataset() -> None:
    """With the same workers; the length of the stream is known only when it has ended."""
    seats, lines = Registry(), Lines({})
    two = [begun(in_order(dataset=7), seats, "a"), begun(stream(lines, batch_size=2), seats, "a")]
    begun(in_order(), seats, "b")
    for step, members in enumerate(["a", "b", "ab", "", "b", "a", "ab", "ab", "a", "a"]):
        first, second = (next(iter(each)) for each in two)
        assert first == second, step
        for each in two:
            each.use()
            each.advance(members)
        if step == 6:  # by another worker, which begins here
            state = two[1].state_dict()
            two[1] = begun(stream(lines, batch_size=2), seats, "a")
            two[1].load_state_dict(state)
        assert two[0].epoch == two[1].epoch
    assert lines.opened.count(0) == 2, "once by each, but for the state: its epoch alone"


class Item:
    """Something that can be watched."""


def test_what_was_read_of_a_stream_and_has_counted_is_forgotten() -> None:
    alive = WeakSet[Item]()

    def items(_epoch: int) -> Iterator[Item]:
        while True:
            item = Item()
            alive.add(item)
            yield item

    batches = begun(stream(items, batch_size=2), Registry(), "a")
    for _ in islice(batches, 20):
        batches.use()
        batches.advance(["a"])
    assert len(alive) < 10


TAKEN = "expected a training run before batches are taken"


@pytest.mark.parametrize(
    ("do", "says"),
    [
        pytest.param(lambda: in_order(dataset=0), "at least one sample for dataset, got 0", id="no samples"),
        pytest.param(lambda: in_order(dataset=[]), "at least one sample for dataset, got 0", id="empty dataset"),
        pytest.param(lambda: in_order(dataset=2.5), "with a length, or a number of samples", id="no length"),
        pytest.param(lambda: in_order(dataset=True), "at least one sample for dataset, got True", id="a bool"),
        pytest.param(lambda: in_order(batch_size=0), "for batch_size, got 0", id="batch size"),
        pytest.param(lambda: in_order(batches_per_step=0), "for batches_per_step, got 0", id="batches per step"),
        pytest.param(lambda: in_order(seed="x"), "for seed, got 'x'", id="seed"),
        pytest.param(lambda: in_order(shuffle="no"), "for shuffle, got 'no'", id="shuffle"),
        pytest.param(
            lambda: stream([1], batch_size=1),  # type: ignore[arg-type]
            "for open_epoch, got",
            id="a stream that is none",
        ),
        pytest.param(
            lambda: next(iter(begun(stream(Lines({0: 0}), batch_size=1), Registry(), "a"))),
            "expected items in epoch 0",
            id="an empty epoch",
        ),
        pytest.param(lambda: next(iter(in_order())), TAKEN, id="no run"),
        pytest.param(lambda: in_order().advance(["a"]), TAKEN, id="rounds without a run"),
        pytest.param(lambda: in_order().use(), "expected 1 batches", id="a step without a batch"),
        pytest.param(lambda: in_order().load_state_dict({}), "got {}", id="no state"),
        pytest.param(
            lambda: in_order().load_state_dict(in_order(batch_size=3).state_dict()),
            "'batch_size': '3'",
            id="other state",
        ),
    ],
)
def test_mistakes(do: Callable[[], object], says: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        do()
    assert says in str(error.value)


class TestWorkers:
    """A worker of `gradserve.training` on a server."""

    @staticmethod
    def begun(client: gradserve.Client, name: str, data: Batches[Any] | None, **how: Any) -> Worker:
        worker = Worker(client, {"w": [0.0]}, name=name, num_required=1, data=data)
        worker.begin(lambda: State({"w": [0.0]}), **how)
        return worker

    def test_a_checkpoint_brings_its_data(self, client: gradserve.Client, name: str) -> None:
        state = in_order().state_dict() | {"step": 3, "first": 4}
        data = in_order()
        with pytest.raises(gradserve.InvalidArgumentError, match="data of step 3, .* got data of step 0"):
            self.begun(client, name, data, start_step=3)
        data.load_state_dict(state)
        worker = self.begun(client, name, data, start_step=3)
        assert next(iter(data)) == [8, 9]
        worker.exchange({"w": [1.0]})
        assert (data.step, data.epoch, worker.step) == (4, 1, 4)
        worker.close()

    @pytest.mark.parametrize(
        ("first", "second", "says"),
        [
            pytest.param(in_order(), in_order(batch_size=3), "batch_size is 2 there and 3 here", id="another"),
            pytest.param(None, in_order(), "have no `data`, and this one has", id="none of the first"),
            pytest.param(in_order(), None, "have `data`, and this one has none", id="none of the second"),
        ],
    )
    def test_all_have_the_same(
        self, client: gradserve.Client, name: str, first: Sampler | None, second: Sampler | None, says: str
    ) -> None:
        worker = self.begun(client, name, first)
        with pytest.raises(gradserve.AlreadyExistsError, match=says):
            self.begun(client, name, second)
        worker.close()

    def test_the_first_worker_says_where_the_data_begin(self, client: gradserve.Client, name: str) -> None:
        first, second = in_order(), in_order()
        first.load_state_dict(first.state_dict() | {"step": 3, "first": 4})
        workers = [self.begun(client, name, each) for each in (first, second)]
        assert second.state_dict() == first.state_dict()
        assert second.state_dict()["step"] == 0, "the step of the run"
        for each in workers:
            each.close()

    def test_a_worker_without_data_in_a_round_is_noticed(self, client: gradserve.Client, name: str) -> None:
        data = in_order()
        worker = self.begun(client, name, data)
        next(iter(data))
        other = self.begun(client, name, None, start_step=0)
        other.exchange({"w": [1.0]})
        with pytest.raises(gradserve.AbortedError, match="has no `data`"):
            worker.exchange({"w": [1.0]})
        assert data.step == worker.step == 0
        worker.close()
        other.close()
