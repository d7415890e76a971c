"""Random interleavings of everything a layer can be asked, against a model of a few lines."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradserve_server.errors import AbortedError, InvalidArgumentError, NotFoundError
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, ForwardCall
from gradserve_server.layers.batch_norm.spec import CallInputs
from tests.journals import ListedJournal
from tests.layers.bench import KEY, LayerBench, contents

EPSILON = 0.5
PAIR = 2 * 8
"""Bytes of a variable, or of one number for each channel."""
VARIABLES_BYTES = 4 * PAIR
DY = np.array([[1.0, 2.0], [-3.0, 0.5]])

ids = st.sampled_from("abcdef")
values = st.integers(-8, 8)


def batch(mean: int, deviation: int) -> np.ndarray:
    """Returns a batch whose moments are so small integers that averages of halves are exact."""
    return np.array([[mean - deviation] * 2, [mean + deviation] * 2], np.float64)


@dataclass
class Saved:
    """What a backward is computed with; `made` tells one computation from another."""

    made: int
    mean: float
    variance: float
    gamma: float
    is_training: bool


@dataclass
class Kept:
    """A forward with something left to do."""

    x: np.ndarray
    lease: float
    expires: float
    saved: Saved | None = None
    pending: Saved | None = None

    @property
    def num_bytes(self) -> int:
        """Inputs, beta, gamma; and mean and variance, which updates wait for too."""
        moments = {each.made for each in (self.saved, self.pending) if each is not None}
        return (self.saved is not None) * (32 + 2 * PAIR) + len(moments) * 2 * PAIR


class LayerMachine(RuleBasedStateMachine):
    """With updates that wait to be run."""

    in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.journal: ListedJournal[Event] = ListedJournal()
        self.bench = LayerBench(journal=self.journal)
        self.number = 0
        self.inputs: dict[str, tuple[int, int]] = {}
        self.create()

    def teardown(self) -> None:
        self.delete()
        self.loop.close()

    def create(self) -> None:
        self.journal.events.clear()
        self.layer = self.new_layer(self.bench)
        self.run(self.layer.build(np.dtype(np.float64), (-1, 2)))
        self.variables = {"beta": 0.0, "gamma": 1.0, "moving_mean": 0.0, "moving_variance": 1.0}
        self.kept: dict[str, Kept] = {}
        self.counted: set[str] = set()
        self.spent: set[str] = set()
        self.num_updates = 0

    def new_layer(self, bench: LayerBench) -> BatchNormLayer:
        arguments: dict[str, Any] = {"updates_collections": None} if self.in_place else {}
        return bench.layer(decay=0.5, scale=True, fused=False, epsilon=EPSILON, **arguments)

    def delete(self) -> None:
        replayed = self.new_layer(LayerBench())
        for event in self.journal.events:
            replayed.replay(event)
        assert contents(replayed) == contents(self.layer)
        assert self.bench.registry.delete(KEY)
        assert (self.bench.memory.used, self.bench.handles.used) == (0, 0)

    # Steps

    @rule(
        forward_id=ids,
        mean=values,
        deviation=values,
        is_training=st.booleans(),
        saves=st.booleans(),
        lease=st.integers(1, 9),
    )
    def forward(self, forward_id: str, mean: int, deviation: int, is_training: bool, saves: bool, lease: int) -> None:
        """New ones and, as ids are few, repeated ones of all kinds."""
        mean, deviation = self.inputs.setdefault(forward_id, (mean, deviation))
        x, v = batch(mean, deviation), self.variables
        call = ForwardCall(is_training=is_training, forward_id=forward_id, keep_for_backward=saves, lease=lease)
        made = self.run(self.layer.forward(CallInputs(x), call, on_host=True))
        self.number += 1
        moments: tuple[float, float] = (mean, deviation**2) if is_training else (v["moving_mean"], v["moving_variance"])
        saved = Saved(self.number, *moments, v["gamma"], is_training)
        normal = (x - saved.mean) / np.sqrt(saved.variance + EPSILON)
        np.testing.assert_allclose(made.outputs, normal * v["gamma"] + v["beta"], rtol=1e-12, atol=1e-12)
        is_new = is_training and forward_id not in self.counted
        if is_new:
            self.counted.add(forward_id)
        if is_new and self.in_place:
            self.update(saved)
        waits = is_new and not self.in_place
        if saves or waits or (is_training and forward_id in self.kept):
            kept = self.kept.setdefault(forward_id, Kept(x, 0, 0))
            kept.lease, kept.expires = lease, self.bench.now + lease
            if saves:
                kept.saved = saved
                self.spent.discard(forward_id)
            if waits:
                kept.pending = saved
        is_pending = forward_id in self.kept and self.kept[forward_id].pending is not None
        assert made.has_pending_updates == is_pending
        assert made.forward_id == (forward_id if saves or is_pending else "")

    @rule(data=st.data(), is_all=st.booleans())
    def run_updates(self, data: st.DataObject, is_all: bool) -> None:
        named = [] if is_all else data.draw(st.lists(ids, min_size=1))
        chosen = list(dict.fromkeys(named)) or list(self.kept)
        waiting = [each for each in chosen if each in self.kept and self.kept[each].pending is not None]
        assert self.run(self.layer.run_updates(named)) == len(waiting)
        for forward_id in waiting:
            pending = self.kept[forward_id].pending
            assert pending is not None
            self.update(pending)
            self.kept[forward_id].pending = None
            self.drop_if_done(forward_id)

    @rule(forward_id=ids, retain=st.booleans())
    def backward(self, forward_id: str, retain: bool) -> None:
        kept = self.kept.get(forward_id)
        if kept is None or kept.saved is None:
            self.fails(AbortedError if forward_id in self.spent else NotFoundError, forward_id, DY)
            return
        call = self.layer.check_backward(forward_id, DY)
        found = self.run(self.layer.backward(call, retain=retain, on_host=True)).outputs
        saved = kept.saved
        inverse = 1 / np.sqrt(saved.variance + EPSILON)
        xhat = (kept.x - saved.mean) * inverse
        g = DY * saved.gamma
        through = g.mean(0) + xhat * (g * xhat).mean(0) if saved.is_training else 0
        np.testing.assert_allclose(found.inputs_gradient, (g - through) * inverse, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.gamma_gradient, (DY * xhat).sum(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.beta_gradient, DY.sum(0), rtol=1e-12)
        kept.expires = self.bench.now + kept.lease
        if not retain:
            self.spend(forward_id)

    @precondition(lambda self: self.kept)
    @rule(forward_id=ids)
    def backward_of_another_shape(self, forward_id: str) -> None:
        if forward_id in self.kept and self.kept[forward_id].saved is not None:
            self.fails(InvalidArgumentError, forward_id, DY[:1])

    @rule(named=st.lists(ids), with_updates=st.booleans())
    def release(self, named: list[str], with_updates: bool) -> None:
        expected = 0
        for forward_id in named:
            if forward_id in self.kept:
                expected += 1
                if with_updates:
                    self.kept[forward_id].pending = None
                self.spend(forward_id)
        assert self.run(self.layer.release(named, with_updates=with_updates)) == expected

    @rule(given=st.dictionaries(st.sampled_from(["beta", "gamma", "moving_mean", "moving_variance"]), values))
    def set_variables(self, given: dict[str, int]) -> None:
        given = {name: abs(value) if name == "moving_variance" else value for name, value in given.items()}
        self.run(self.layer.set_variables({name: np.full(2, value, np.float64) for name, value in given.items()}))
        self.variables |= {name: float(value) for name, value in given.items()}

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.bench.now += seconds
        expired = [forward_id for forward_id, kept in self.kept.items() if kept.expires <= self.bench.now]
        assert self.run(self.bench.registry.expire()) == len(expired)
        for forward_id in expired:
            if self.kept.pop(forward_id).pending is not None:
                self.counted.discard(forward_id)

    @precondition(lambda self: self.num_updates > 3)
    @rule()
    def begin_anew(self) -> None:
        self.delete()
        self.create()

    # After each

    @invariant()
    def agrees(self) -> None:
        found = {name: set(value) for name, value in self.layer.get_variables(()).items()}
        assert found == {name: {value} for name, value in self.variables.items()}
        assert self.layer.num_updates == self.num_updates
        assert len(self.layer.forwards) == len(self.kept) == self.bench.handles.used
        num_bytes = VARIABLES_BYTES + sum(kept.num_bytes for kept in self.kept.values())
        assert self.layer.num_bytes == self.bench.memory.used == num_bytes

    def update(self, moments: Saved) -> None:
        for name, value in (("moving_mean", moments.mean), ("moving_variance", moments.variance)):
            self.variables[name] += (value - self.variables[name]) / 2
        self.num_updates += 1

    def spend(self, forward_id: str) -> None:
        self.kept[forward_id].saved = None
        self.spent.add(forward_id)
        self.drop_if_done(forward_id)

    def drop_if_done(self, forward_id: str) -> None:
        if self.kept[forward_id].saved is None and self.kept[forward_id].pending is None:
            del self.kept[forward_id]

    def fails(self, error: type[Exception], forward_id: str, dy: np.ndarray) -> None:
        try:
            self.layer.check_backward(forward_id, dy)
        except error:
            return
        raise AssertionError(f"expected {error.__name__}")

    def run(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)


class InPlaceLayerMachine(LayerMachine):
    """With updates in place."""

    in_place = True


# Of so many updates by halves, each is exact in float64.
_SETTINGS = settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LayerMachine.TestCase.settings = _SETTINGS
InPlaceLayerMachine.TestCase.settings = _SETTINGS
TestLayerMachine = LayerMachine.TestCase
TestInPlaceLayerMachine = InPlaceLayerMachine.TestCase
