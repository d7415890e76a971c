"""What a layer keeps of forwards: for how long, for whom, and that each counts once."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import AbortedError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from gradserve_server.layers.batch_norm.config import RandomAdjustment
from gradserve_server.layers.batch_norm.events import AdjustmentDrawn
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.resources.memory import Room
from tests.layers.bench import KEY, LayerBench, backward, forward, release, run_updates

X = np.arange(12, dtype=np.float32).reshape(4, 3) ** 2
DY = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
IN_PLACE: dict[str, Any] = {"updates_collections": None}
DELAYED: dict[str, Any] = {}


@pytest.fixture
def bench() -> Iterator[LayerBench]:
    """Every test gives all back that it took."""
    made = LayerBench()
    yield made
    made.registry.delete(KEY)
    assert (made.memory.used, made.handles.used, made.registry.count.used) == (0, 0, 0)


def batch(mean: float) -> np.ndarray:
    """Returns inputs whose mean is `mean`, and whose variance is 1."""
    return np.array([[mean - 1] * 3, [mean + 1] * 3], np.float32)


def averages(layer: BatchNormLayer) -> Mapping[str, Any]:
    return {name: np.array(value) for name, value in layer.get_variables(()).items()}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def set_to(layer: BatchNormLayer, **values: float) -> None:
    found = layer.get_variables(list(values))
    asyncio.run(layer.set_variables({name: np.full_like(found[name], value) for name, value in values.items()}))


@pytest.mark.parametrize("arguments", [IN_PLACE, DELAYED])
def test_what_was_reserved_for_a_forward_becomes_what_is_kept_of_it(
    bench: LayerBench, arguments: dict[str, Any]
) -> None:
    layer = bench.layer(**arguments)
    reserved, delivery, seen = Room(bench.memory.reserve()), bench.memory.reserve(), []

    async def delivered(outputs: Any) -> None:
        delivery.take_over(outputs.nbytes, reserved.host)
        seen.append((reserved.used, bench.memory.used))

    call = ForwardCall(keep_for_backward=True)
    asyncio.run(layer.forward(CallInputs(X), call, on_host=True, deliver=delivered, room=reserved))
    ((kept_back, used),) = seen
    assert kept_back > 0
    assert reserved.used == 0
    assert bench.memory.used == layer.num_bytes + X.nbytes >= used, "it was not free in between"
    delivery.settle(0)


class TestLeases:
    def test_a_forward_is_kept_for_its_lease(self, bench: LayerBench) -> None:
        layer = bench.layer()
        made = forward(layer, X, lease=10)
        bench.now = 9.9
        assert bench.expire() == 0
        bench.now = 10
        assert bench.expire() == 1
        with pytest.raises(NotFoundError, match="its lease has ended"):
            backward(layer, made.forward_id, DY)
        assert run_updates(layer) == 0
        assert (bench.handles.used, layer.num_bytes) == (0, 3 * 3 * 4)

    def test_use_renews_it(self, bench: LayerBench) -> None:
        layer = bench.layer()
        made = forward(layer, X, lease=10)
        for bench.now in (9, 18, 27):
            backward(layer, made.forward_id, DY, retain=True)
            assert bench.expire() == 0
        bench.now = 37
        assert bench.expire() == 1

    def test_a_repeated_forward_renews_it_even_if_it_keeps_nothing_new(self, bench: LayerBench) -> None:
        layer = bench.layer()
        for bench.now in (0, 9, 18):
            assert bench.expire() == 0
            assert forward(layer, X, forward_id="a", lease=10, keep_for_backward=False).has_pending_updates
        bench.now = 27
        assert bench.expire() == 0
        bench.now = 28
        assert bench.expire() == 1

    def test_one_in_use_does_not_expire(self, bench: LayerBench) -> None:
        layer = bench.layer()
        kept = layer.forwards.get(forward(layer, X, lease=10).forward_id)
        bench.now = 20
        with layer.forwards.use(kept, retain=True), layer.forwards.hold(kept):
            assert bench.expire() == 0
        assert bench.expire() == 0
        bench.now = 30
        assert bench.expire() == 1

    def test_what_waits_for_its_updates_expires_too(self, bench: LayerBench) -> None:
        layer = bench.layer()
        made = forward(layer, X, lease=10)
        backward(layer, made.forward_id, DY)
        bench.now = 30
        assert bench.expire() == 1
        assert run_updates(layer) == layer.num_updates == 0


class TestBackward:
    def test_once(self, bench: LayerBench) -> None:
        layer = bench.layer(**IN_PLACE)
        made = forward(layer, X)
        backward(layer, made.forward_id, DY)
        for _ in range(2):
            with pytest.raises(AbortedError, match="were computed already, or it was released"):
                backward(layer, made.forward_id, DY)

    def test_or_as_often_as_it_is_retained(self, bench: LayerBench) -> None:
        layer = bench.layer()
        made = forward(layer, X)
        results = [backward(layer, made.forward_id, DY, retain=True) for _ in range(3)]
        results.append(backward(layer, made.forward_id, DY))
        for result in results[1:]:
            np.testing.assert_array_equal(result.inputs_gradient, results[0].inputs_gradient)

    @pytest.mark.parametrize(
        "wrong", [DY[:3], DY.T, DY.astype(np.float64), DY[..., None]], ids=lambda dy: str(dy.shape)
    )
    def test_a_gradient_that_does_not_fit_changes_nothing(self, bench: LayerBench, wrong: Any) -> None:
        layer = bench.layer()
        made = forward(layer, X)
        held = bench.memory.used
        with pytest.raises(InvalidArgumentError, match="expected the dtype and shape of the outputs, float32"):
            backward(layer, made.forward_id, wrong)
        assert bench.memory.used == held
        backward(layer, made.forward_id, DY)

    @pytest.mark.parametrize("forward_id", ["", "nobody", "a" * 1000])
    def test_of_an_unknown_one(self, bench: LayerBench, forward_id: str) -> None:
        with pytest.raises(NotFoundError):
            backward(bench.layer(), forward_id, DY)

    def test_of_one_that_kept_nothing(self, bench: LayerBench) -> None:
        layer = bench.layer()
        made = forward(layer, X, keep_for_backward=False)
        assert made.has_pending_updates
        with pytest.raises(NotFoundError, match="did not keep what its gradients need"):
            backward(layer, made.forward_id, DY)
        assert run_updates(layer) == 1
        assert forward(layer, X, False, keep_for_backward=False).forward_id == ""

    def test_of_one_that_was_released(self, bench: LayerBench) -> None:
        layer = bench.layer()
        first, second = forward(layer, X), forward(layer, X)
        forward(layer, X, released=[first.forward_id, "nobody"])
        with pytest.raises(AbortedError):
            backward(layer, first.forward_id, DY)
        # Its updates can still be run; those of one that is let go of altogether cannot.
        assert run_updates(layer, first.forward_id) == 1
        assert release(layer, second.forward_id, second.forward_id, "nobody") == 1
        assert run_updates(layer, second.forward_id) == 0

    def test_each_has_the_variables_of_its_forward(self, bench: LayerBench) -> None:
        """With mean 0, beta 0 and gamma g: dgamma is sum dy xhat, whatever g; dx grows with g."""
        layer = bench.layer(scale=True, epsilon=0.0)
        made: list[ForwardResult] = []
        for gamma in (1.0, 2.0, 3.0):
            if made:
                set_to(layer, gamma=gamma, beta=gamma)
            made.append(forward(layer, X))
        set_to(layer, gamma=9.0, beta=9.0)
        run_updates(layer)
        found = {index: backward(layer, made[index].forward_id, DY) for index in (2, 0, 1)}
        for index in (1, 2):
            times = index + 1
            np.testing.assert_allclose(found[index].inputs_gradient, found[0].inputs_gradient * times, rtol=1e-5)
            np.testing.assert_array_equal(found[index].gamma_gradient, found[0].gamma_gradient)
            np.testing.assert_allclose(made[index].outputs, made[0].outputs * times + times, rtol=1e-5, atol=1e-5)


class TestDelayedUpdates:
    def test_each_is_run_once(self, bench: LayerBench) -> None:
        layer = bench.layer()
        ids = [forward(layer, batch(mean)).forward_id for mean in (1, 2, 3)]
        assert layer.num_updates == 0
        assert run_updates(layer, ids[1], ids[1]) == 1
        assert run_updates(layer, ids[1]) == 0
        assert run_updates(layer) == 2
        assert run_updates(layer) == run_updates(layer, *ids, "nobody") == 0
        assert layer.num_updates == 3

    @pytest.mark.parametrize(
        ("given", "order"),
        [((), (0, 1, 2)), ((2, 0, 1), (2, 0, 1)), ((1,), (1,)), ((2, 1, 2), (2, 1))],
        ids=str,
    )
    def test_in_the_order_given_or_oldest_first(self, bench: LayerBench, given: Any, order: Any) -> None:
        layer = bench.layer(decay=0.5)
        means = (8.0, 16.0, 64.0)
        ids = [forward(layer, batch(mean)).forward_id for mean in means]
        assert run_updates(layer, *(ids[index] for index in given)) == len(order)
        expected = 0.0
        for index in order:
            expected += (means[index] - expected) / 2
        np.testing.assert_array_equal(layer.get_variables(["moving_mean"])["moving_mean"], [expected] * 3)

    def test_also_after_backward(self, bench: LayerBench) -> None:
        layer = bench.layer()
        made = forward(layer, X)
        backward(layer, made.forward_id, DY)
        assert len(layer.forwards) == 1
        assert run_updates(layer, made.forward_id) == 1
        assert len(layer.forwards) == 0

    def test_backward_after_them(self, bench: LayerBench) -> None:
        layer = bench.layer()
        made = forward(layer, X)
        run_updates(layer)
        backward(layer, made.forward_id, DY)
        assert len(layer.forwards) == 0

    def test_what_waits_counts_as_memory(self, bench: LayerBench) -> None:
        layer = bench.layer(fused=False)
        variables = 3 * 3 * 4
        made = forward(layer, X)
        moments = 2 * 3 * 4
        assert layer.num_bytes == bench.memory.used == variables + X.nbytes + moments + 3 * 4  # and its beta
        backward(layer, made.forward_id, DY)
        assert layer.num_bytes == bench.memory.used == variables + moments
        run_updates(layer)
        assert layer.num_bytes == bench.memory.used == variables


REPLAYS = {
    "at once": lambda layer, forward_id: None,
    "after run_updates": lambda layer, forward_id: run_updates(layer),
    "after backward": lambda layer, forward_id: backward(layer, forward_id, DY),
    "after both": lambda layer, forward_id: (run_updates(layer), backward(layer, forward_id, DY)),
    "after its release": lambda layer, forward_id: release(layer, forward_id, with_updates=False),
    "after 5000 others": lambda layer, forward_id: [
        layer.replay(AdjustmentDrawn(f"other {number}", number)) for number in range(5000)
    ],
}


class TestReplays:
    @pytest.mark.parametrize("between", REPLAYS.values(), ids=list(REPLAYS))
    @pytest.mark.parametrize("arguments", [IN_PLACE, DELAYED], ids=["in place", "delayed"])
    def test_count_once(self, bench: LayerBench, arguments: dict[str, Any], between: Any) -> None:
        layer = bench.layer(**arguments)
        first = forward(layer, X, forward_id="a")
        between(layer, "a")
        again = forward(layer, X, forward_id="a")
        np.testing.assert_array_equal(again.outputs, first.outputs)
        run_updates(layer)
        assert layer.num_updates == 1
        backward(layer, "a", DY)
        assert run_updates(layer) == len(layer.forwards) == 0
        forward(layer, X, forward_id="a", keep_for_backward=False)
        run_updates(layer)
        assert layer.num_updates == 1

    def test_without_an_id_each_counts(self, bench: LayerBench) -> None:
        layer = bench.layer(**IN_PLACE)
        for _ in range(3):
            forward(layer, X)
        assert layer.num_updates == 3

    def test_draw_the_same_adjustment(self, bench: LayerBench) -> None:
        layer = bench.layer(adjustment=RandomAdjustment((0.5, 1.5), (-1.0, 1.0), seed=3))
        first = forward(layer, X, forward_id="a")
        other = forward(layer, X, forward_id="b")
        run_updates(layer)
        backward(layer, "a", DY)
        again = forward(layer, X, forward_id="a")
        assert first.drawn is not None
        assert again.drawn is not None
        assert other.drawn is not None
        for index in (0, 1):
            np.testing.assert_array_equal(again.drawn[index], first.drawn[index])
            assert not np.array_equal(other.drawn[index], first.drawn[index])
        np.testing.assert_array_equal(again.outputs, first.outputs)

    def test_the_same_seed_draws_the_same_in_every_layer(self) -> None:
        def drawn(seed: int) -> list[Any]:
            layer = LayerBench().layer(adjustment=RandomAdjustment((0.5, 1.5), (-1.0, 1.0), seed=seed))
            return [part for _ in range(3) for part in forward(layer, X).drawn or ()]

        one, two, other = drawn(1), drawn(1), drawn(2)
        assert all(map(np.array_equal, one, two))
        assert not any(map(np.array_equal, one, other))
        assert all(scale.min() >= 0.5 and scale.max() < 1.5 for scale in one[::2])
        assert all(bias.min() >= -1 and bias.max() < 1 for bias in one[1::2])

    def test_inference_is_never_counted(self, bench: LayerBench) -> None:
        layer = bench.layer(**IN_PLACE)
        made = forward(layer, X, False, forward_id="a")
        before = averages(layer)
        backward(layer, made.forward_id, DY)
        assert same(averages(layer), before)
        assert layer.num_updates == 0

    def test_an_id_that_is_too_long(self, bench: LayerBench) -> None:
        layer = bench.layer(**IN_PLACE)
        with pytest.raises(InvalidArgumentError, match="expected at most 128 bytes, got 129"):
            forward(layer, X, forward_id="é" * 64 + "x")
        assert layer.variables is None
        assert forward(layer, X, forward_id="é" * 64).forward_id == "é" * 64


def test_a_refused_forward_releases_nothing() -> None:
    bench = LayerBench(limit=2000)
    layer = bench.layer()
    first = forward(layer, X)
    with pytest.raises(ResourceExhaustedError):
        forward(layer, np.ones((500, 3), np.float32), released=[first.forward_id])
    backward(layer, first.forward_id, X)


def test_inference_does_not_use_up_what_is_remembered() -> None:
    layer = LayerBench(remembered=8).layer(updates_collections=None)
    forward(layer, X, forward_id="a", keep_for_backward=False)
    for _ in range(10):
        forward(layer, X, is_training=False, keep_for_backward=False)
    forward(layer, X, forward_id="a", keep_for_backward=False)
    assert layer.num_updates == 1


def test_a_forward_whose_updates_expired_counts_when_it_is_repeated(bench: LayerBench) -> None:
    layer = bench.layer()
    for _ in range(2):
        forward(layer, X, forward_id="a", lease=10)
        bench.now += 11
        assert bench.expire() == 1
    forward(layer, X, forward_id="a")
    assert (run_updates(layer), layer.num_updates) == (1, 1)
