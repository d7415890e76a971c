"""The cases of torchft's tests of local_sgd, with a real server in place of their stand-in for a manager.

A model has a weight in each layer, and each inner step adds a constant to all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradserve
from gradserve import optim
from gradserve.torch import DiLoCo, LocalSGD
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.torch.training_threads import together

SIZES = (6, 6, 6, 1)
SPEEDS = (1.0, 3.0)
OUTER_RATE = 0.5
MEAN = optim.SGD(1.0)


class Layers(torch.nn.Module):
    """A model of a parameter for each size, all of whose elements are 0 at first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(size) for size in sizes)


class Replica:
    """A worker whose inner steps add a multiple of a direction, by default of ones, to each layer."""

    def __init__(
        self, sizes: Sequence[int], speed: float, direction: Callable[[int], torch.Tensor] = torch.ones
    ) -> None:
        self.model = Layers(sizes)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self._gradients = [-speed * direction(size) for size in sizes]

    @property
    def weights(self) -> list[list[float]]:
        return [each.tolist() for each in self.model.parameters()]

    def step(self) -> None:
        for parameter, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient.clone()
        self.inner.step()


class Calls(gradserve.Interceptor):
    """Notes calls once `is_on`, but for that which holds the worker's lease, and refuses some.

    Attributes:
        seen: The methods of the calls and the names of their parameters, in order.
        refused: The places in that order whose calls never reach the server.
    """

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.is_on = False
        self.seen: list[tuple[str, str]] = []
        self.refused = refused

    def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
        if self.is_on and not call.method.endswith("/HoldClientLease"):
            self.seen.append((call.method.rpartition("/")[2], call.name))
            if len(self.seen) - 1 in self.refused:
                raise gradserve.UnavailableError("the test lets nothing through")
        yield None


@pytest.mark.parametrize(
    ("kind", "options", "turns"),
    [
        (LocalSGD, {"sync_every": 2}, {2: 0, 4: 0, 6: 0}),
        (DiLoCo, {"sync_every": 3}, {3: 0, 6: 0}),
        (DiLoCo, {"sync_every": 4, "fragments": 2}, {2: 0, 4: 1, 6: 0}),
        (DiLoCo, {"sync_every": 4, "fragments": 4}, {1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1}),
        (DiLoCo, {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1}, {1: 0, 3: 1, 5: 0}),
        (DiLoCo, {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 3}, {1: 0, 3: 1, 5: 0}),
    ],
    ids=["LocalSGD", "whole", "two fragments", "four fragments", "a delay", "a delay of more than a turn"],
)
def test_a_synchronization_is_one_call_when_its_turn_has_come(
    server_address: str, name: str, kind: Any, options: Any, turns: Mapping[int, int]
) -> None:
    """Of all tensors of a fragment together; and no step makes any other call, nor any step after the block."""
    calls, replica = Calls(), Replica(SIZES, 1.0)
    with gradserve.connect(server_address, interceptors=[calls]) as client:
        expected: list[tuple[str, str]] = []
        with kind(client, replica.model, replica.inner, name=name, num_required=1, **options):
            calls.is_on = True
            for number in range(1, 7):
                replica.step()
                if number in turns:
                    suffix = f"/{turns[number]}" if turns[number] else ""
                    expected.append(("PushPullParameters", name + suffix))
                eventually(lambda: len(calls.seen) >= len(expected))
                assert calls.seen == expected
        replica.step()
        assert calls.seen == expected


def test_hooks_go_when_a_block_fails(client: gradserve.Client, name: str) -> None:
    replica = Replica(SIZES, 1.0)

    def fail() -> None:
        with DiLoCo(client, replica.model, replica.inner, sync_every=2, name=name, num_required=1):
            replica.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    replica.step()
    assert client.parameters(shared_name=name).info().step == 0


def test_the_common_values_and_the_outer_state(client: gradserve.Client, name: str, tmp_path: Path) -> None:
    """They are the server's: untouched by inner steps, and the model's own after a synchronization."""
    replica = Replica(SIZES, 1.0)
    with DiLoCo(client, replica.model, replica.inner, sync_every=2, name=name, num_required=1):
        parameters = client.parameters(shared_name=name)

        def held() -> tuple[list[list[float]], dict[str, list[float]]]:
            parameters.save(tmp_path / "saved")
            saved = gradserve.load_parameters(tmp_path / "saved")
            assert saved.state is not None
            state = {key: each.tolist() for (_, key), each in saved.state.slots.items()}
            return [each.tolist() for each in parameters.read().values.values()], state

        initial = [[0.0] * size for size in SIZES]
        before = (initial, {f"layers.{number}": each for number, each in enumerate(initial)})
        assert held() == before
        replica.step()
        assert replica.weights == [[1.0] * size for size in SIZES]
        assert held() == before
        replica.step()
        values, state = held()
        assert values == replica.weights
        # Old minus new is the outer gradient, and the momentum after the first of them.
        assert state == {f"layers.{number}": [-2.0] * size for number, size in enumerate(SIZES)}
        np.testing.assert_allclose(values[0], 0.7 * 1.9 * 2.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("fragments", "codec", "error"),
    [
        *[(number, None, 0.0) for number in range(1, len(SIZES) + 1)],
        ([[f"layers.{number}" for number in group] for group in ((3, 1), (0, 2))], None, 0.0),
        (2, "bf16", 0.0),
        (2, "int8", 0.01),
    ],
    ids=str,
)
def test_each_element_counts_once_however_they_are_divided_and_packed(
    clients: list[gradserve.Client], name: str, fragments: Any, codec: str | None, error: float
) -> None:
    steps = 12

    def ramp(size: int) -> torch.Tensor:
        return 1.0 + torch.arange(size)

    def work(rank: int) -> list[list[float]]:
        replica = Replica(SIZES, SPEEDS[rank], ramp)
        given: Any = {"fragments": fragments, "codec": codec, "codec_down": codec, "outer_optimizer": MEAN}
        with DiLoCo(
            clients[rank], replica.model, replica.inner, sync_every=steps, name=name, num_required=2, **given
        ) as diloco:
            for _ in range(steps):
                replica.step()
            diloco.sync()
        return replica.weights

    one, other = together(partial(work, 0), partial(work, 1))
    assert one == other
    for weights, size in zip(one, SIZES, strict=True):
        np.testing.assert_allclose(weights, steps * 2.0 * ramp(size), rtol=error)


# Failures


@dataclass
class Expected:
    """What torchft does, in a model of a weight for each fragment.

    Attributes:
        common: The weights that replicas have in common.
        local: The weights of each replica.
        num_commits: The synchronizations that did not fail, which says whose turn it is.
    """

    num_fragments: int
    delay: int
    alpha: float
    period: int
    common: list[float] = field(init=False)
    local: list[list[float]] = field(init=False)
    num_commits: int = 0
    num_begun: int = 0

    def __post_init__(self) -> None:
        self.common = [0.0] * self.num_fragments
        self.local = [[0.0] * self.num_fragments for _ in SPEEDS]

    def step(self, number: int, failing: int) -> None:
        for own, speed in zip(self.local, SPEEDS, strict=True):
            own[:] = [weight + speed for weight in own]
        turn = self.num_commits % self.num_fragments
        if (number + self.delay) % self.period == 0:
            self._mean = sum([own[turn] - self.common[turn] for own in self.local]) / len(SPEEDS)
        if number % self.period == 0:
            is_failing = self.num_begun == failing
            self.num_begun += 1
            if not is_failing:
                self.common[turn] += OUTER_RATE * self._mean
                self.num_commits += 1
            alpha = 0.0 if is_failing else self.alpha
            for own in self.local:
                own[turn] = alpha * own[turn] + (1 - alpha) * self.common[turn]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_a_synchronization_that_fails_everywhere(
    server_address: str, name: str, num_fragments: int, delay: int, alpha: float
) -> None:
    """The fragment goes back to the common weights, the outer optimizer takes no step, and its turn comes again."""
    sync_every, steps, failing = 4, 12, 1
    model = Expected(num_fragments, delay, alpha, sync_every // num_fragments)
    expected: list[list[list[float]]] = [[] for _ in SPEEDS]
    for number in range(1, steps + 1):
        model.step(number, failing)
        for history, own in zip(expected, model.local, strict=True):
            history.append(list(own))

    def work(rank: int) -> list[list[float]]:
        calls, replica, history = Calls([failing]), Replica([1] * num_fragments, SPEEDS[rank]), []
        given: Any = {"fragments": num_fragments, "fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        with (
            gradserve.connect(server_address, interceptors=[calls], timeout=PATIENCE_SECONDS) as client,
            DiLoCo(
                client,
                replica.model,
                replica.inner,
                sync_every=sync_every,
                outer_optimizer=optim.SGD(OUTER_RATE),
                name=name,
                num_required=2,
                on_failure="reset",
                **given,
            ),
        ):
            calls.is_on = True
            for _ in range(steps):
                replica.step()
                history.append([weight for (weight,) in replica.weights])
        return history

    assert together(partial(work, 0), partial(work, 1)) == expected
    with gradserve.connect(server_address) as client:
        found = [
            client.parameters(shared_name=f"{name}/{number}" if number else name).read()
            for number in range(num_fragments)
        ]
        assert [float(each[f"layers.{number}"][0]) for number, each in enumerate(found)] == model.common
        assert sum([each.step for each in found]) == model.num_commits


def test_a_replica_that_joins_between_the_turns_of_fragments(
    server_address: str, clients: list[gradserve.Client], name: str
) -> None:
    """It pushes the fragment whose turn it is for the others, in the same rounds."""
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    replicas = [Replica([1, 1], speed) for speed in (*SPEEDS, 5.0)]

    def diloco(client: gradserve.Client, rank: int) -> DiLoCo:
        each = replicas[rank]
        return DiLoCo(client, each.model, each.inner, name=name, num_required=2, worker_id=str(rank), **options)

    def walk(rank: int, steps: int) -> None:
        for _ in range(steps):
            replicas[rank].step()

    with diloco(clients[0], 0) as first, diloco(clients[1], 1) as second:
        together(partial(walk, 0, 2), partial(walk, 1, 2))
        fragments = [clients[0].parameters(shared_name=each) for each in (name, f"{name}/1")]
        for each in fragments:
            each.change(num_required=3)
        with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client, diloco(client, 2) as third:
            assert third.step == first.step == second.step == 2
            together(*[partial(walk, rank, 4) for rank in range(3)])
            assert {(each.step, each.num_failed) for each in (first, second, third)} == {(6, 0)}
    by_round = [[{each.worker_id for each in record.updates} for record in found.rounds()] for found in fragments]
    assert by_round == [[{"0", "1"}, {"0", "1", "2"}], [{"0", "1", "2"}]]
