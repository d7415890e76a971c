"""DiLoCo with a delay and with mixing, by parameters on a server, beside the expected values of torchft's own tests.

data/torchft.json says where they come from, and what the replicas do. Each fragment is parameters of its own.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import optim

EXPECTED = json.loads((Path(__file__).parent / "data" / "torchft.json").read_text(encoding="utf-8"))
FIRST = 1.0
GRADIENT, INNER_RATE, OUTER_RATE = 2.0, 1.0, 2.0
FRAGMENTS = 2
EVERY = 3
"""The steps between two synchronizations, each of one fragment: sync_every / fragments."""
TIMEOUT = 120.0


def fragments(client: gradserve.Client, name: str, num_required: int) -> list[gradserve.Parameters]:
    """Finds or creates the parameters of the fragments."""
    return [
        client.parameters(
            {"weight": np.full(1, FIRST, np.float32)},
            shared_name=f"{name}-{number}",
            optimizer=optim.SGD(OUTER_RATE),
            update="delta",
            num_required=num_required,
        )
        for number in range(FRAGMENTS)
    ]


@dataclass
class Replica:
    """One replica.

    Attributes:
        fragments: The parameters of its fragments.
        worker_id: Its id.
        delay: The steps between the delta and the synchronization.
        alpha: How much of the local weights stays.
        local: Its weights before the first step and after each.
        agreed: The weights that it has in common with the others, after each synchronization, by step.
        only_reads: The fragments that it does not push the next time.
    """

    fragments: Sequence[gradserve.Parameters]
    worker_id: str
    delay: int = 0
    alpha: float = 0.0
    local: list[list[float]] = field(default_factory=list)
    agreed: dict[str, list[float]] = field(default_factory=dict)
    only_reads: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """Reads the newest versions."""
        self.anchors = [each.read() for each in self.fragments]
        self.weights = [float(each["weight"][0]) for each in self.anchors]
        self.deltas: list[float] = [0.0] * FRAGMENTS
        self.local.append(list(self.weights))

    def step(self, number: int) -> None:
        """Takes a step, from 1 on, and synchronizes the fragment whose turn it is."""
        self.weights = [weight - INNER_RATE * GRADIENT for weight in self.weights]
        turn = ((number - 1) // EVERY) % FRAGMENTS
        if (number + self.delay) % EVERY == 0:
            self.deltas[turn] = self.weights[turn] - self.anchor(turn)
        if number % EVERY == 0:
            self.synchronize(turn)
        self.local.append(list(self.weights))

    def anchor(self, fragment: int) -> float:
        return float(self.anchors[fragment]["weight"][0])

    def synchronize(self, fragment: int) -> None:
        parameters, anchor = self.fragments[fragment], self.anchors[fragment]
        if fragment in self.only_reads:
            self.only_reads.remove(fragment)
            self.anchors[fragment] = parameters.read(anchor.step + 1, TIMEOUT)
        else:
            update = {"weight": np.full(1, self.deltas[fragment], np.float32)}
            pulled = parameters.push_pull(update, anchor, worker_id=self.worker_id, timeout=TIMEOUT)
            assert pulled.outcome is gradserve.ACCEPTED
            self.anchors[fragment] = pulled.version
        mine, agreed = self.weights[fragment], self.anchor(fragment)
        self.weights[fragment] = self.alpha * mine + (1 - self.alpha) * agreed

    def run(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.step(number)

    def run_from_the_beginning(self, num_steps: int) -> None:
        self.begin()
        self.agreed["0"] = [self.anchor(each) for each in range(FRAGMENTS)]
        for number in range(1, num_steps + 1):
            self.step(number)
            if number % EVERY == 0 and number < num_steps:
                self.agreed[str(number)] = [self.anchor(each) for each in range(FRAGMENTS)]


@pytest.fixture
def clients(server_address: str) -> Iterator[list[gradserve.Client]]:
    with gradserve.connect(server_address) as one, gradserve.connect(server_address) as other:
        yield [one, other]


def name_of(case: Any) -> str:
    return f"delay {case['delay']}, alpha {case['alpha']}"


@pytest.mark.parametrize("case", EXPECTED["delays"], ids=name_of)
def test_delays_and_mixing(clients: list[gradserve.Client], name: str, case: Any) -> None:
    replicas = [
        Replica(fragments(client, name, 2), f"replica {rank}", case["delay"], case["alpha"])
        for rank, client in enumerate(clients)
    ]
    num_steps = len(case["replicas"][0]["local"]) - 1
    with ThreadPoolExecutor(len(replicas)) as threads:
        for running in [threads.submit(replica.run_from_the_beginning, num_steps) for replica in replicas]:
            running.result()
    for replica, expected in zip(replicas, case["replicas"], strict=True):
        assert replica.local == expected["local"]
        assert replica.agreed == expected["global"]


def test_a_replica_that_fails(clients: list[gradserve.Client], name: str) -> None:
    """The survivor has torchft's weights, and so has the healed replica once it has both fragments from the server.

    It begins with the global weights, where torchft copies the survivor's local ones. A fragment that it has not
    trained since the last synchronization of that, it only reads.
    """
    expected = EXPECTED["failure"][0]
    last = len(expected["local"]) - 1
    healed_at = 3 * EVERY
    survivor, lost = (Replica(fragments(client, name, 1), f"replica {rank}") for rank, client in enumerate(clients))
    for each in (survivor, lost):
        each.begin()
    lost.run(1, EVERY - 1)  # and never again
    survivor.run(1, healed_at)
    healed = Replica(fragments(clients[1], name, 1), "replica 1", only_reads={1})
    healed.begin()
    assert healed.local == [[expected["global"][str(healed_at)][number] for number in range(FRAGMENTS)]]
    healed.fragments[0].change(num_required=2)
    run_together([survivor, healed], healed_at + 1, healed_at + EVERY)
    healed.fragments[1].change(num_required=2)
    run_together([survivor, healed], healed_at + EVERY + 1, last)
    assert survivor.local == expected["local"]
    assert healed.local[EVERY:] == expected["local"][healed_at + EVERY :]


def run_together(replicas: Sequence[Replica], first: int, last: int) -> None:
    """Lets replicas take steps, each in a thread."""
    with ThreadPoolExecutor(len(replicas)) as threads:
        for each in [threads.submit(replica.run, first, last) for replica in replicas]:
            each.result()
