"""Workers at equal steps have equal weights, whoever is late, however late, and in whatever order."""

import random
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import pytest

import gradserve
from gradserve.training import Advance
from tests.servers.polling import PATIENCE_SECONDS
from tests.training.replicas import Replica, have_equal_weights


@dataclass
class Run:
    """Workers that begin steps in any order, each in its own thread while it waits for its round.

    Attributes:
        replicas: The workers.
        threads: One for each.
        seen: The weights of every step that a worker has reached, as bytes.
        under_way: The steps that workers have begun.
    """

    replicas: Sequence[Replica]
    threads: ThreadPoolExecutor
    seen: dict[int, bytes] = field(default_factory=dict)
    under_way: dict[int, Future[Advance]] = field(default_factory=dict)
    num_late: int = 0
    num_states: int = 0

    def start(self, number: int) -> None:
        """Begins a step of a worker, unless it is in one."""
        if number not in self.under_way:
            self.under_way[number] = self.threads.submit(self.replicas[number].train)

    def look(self) -> None:
        """Checks the weights of the workers whose steps have ended."""
        for number, step in list(self.under_way.items()):
            if step.done():
                del self.under_way[number]
                advance = step.result()
                replica = self.replicas[number]
                assert replica.step == advance.step
                assert self.seen.setdefault(replica.step, replica.weights.tobytes()) == replica.weights.tobytes()
                self.num_late += advance.was_late
                self.num_states += advance.state is not None

    def turn(self, numbers: Sequence[int], num_required: int) -> None:
        """Lets workers begin steps, and waits for the first that ends one if they are enough for a round."""
        for number in numbers:
            self.start(number)
        current = self.replicas[0].worker.accumulator.info().global_step
        in_time = [number for number in self.under_way if self.replicas[number].step == current]
        if len(in_time) >= num_required:
            self.wait()
        self.look()

    def finish(self) -> None:
        """Lets workers go on until all stand at the same step."""
        while self.under_way or len({each.step for each in self.replicas}) > 1:
            newest = max(each.step for each in self.replicas)
            everybody = range(len(self.replicas))
            behind = [number for number in everybody if self.replicas[number].step < newest]
            # One that is not late waits for the others, and can answer those that need a state meanwhile.
            resting = next(number for number in everybody if number not in behind)
            for number in (*behind, resting) if behind else everybody:
                self.start(number)
            self.wait()
            self.look()

    def wait(self) -> None:
        """Waits for a step to end."""
        ended, _ = wait(self.under_way.values(), PATIENCE_SECONDS, FIRST_COMPLETED)
        assert ended, f"nobody goes on: {[each.step for each in self.replicas]}"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_workers", "num_required", "keep_averages"), [(4, 3, 4), (4, 2, 4), (4, 2, 1)])
def test_any_order(
    client: gradserve.Client, name: str, num_workers: int, num_required: int, keep_averages: int, seed: int
) -> None:
    """Some take many steps while others take none; with one average kept, those must take a state."""
    chance = random.Random(seed)
    replicas = [
        Replica(client, name, f"worker-{number}", num_required, keep_averages=keep_averages).begin()
        for number in range(num_workers)
    ]
    with ThreadPoolExecutor(num_workers) as threads:
        run = Run(replicas, threads, {0: replicas[0].weights.tobytes()})
        for _ in range(8):
            eager = chance.sample(range(num_workers), chance.randint(num_required, num_workers))
            for _ in range(chance.randint(1, 6)):
                run.turn(eager, num_required)
        run.finish()
    assert have_equal_weights(*replicas)
    assert run.num_late
    for each in replicas:
        each.worker.close()
