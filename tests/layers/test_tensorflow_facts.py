"""What TensorFlow's own tests and documents state about the layer, in numbers that are worked out here."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.spec import BackwardOutputs
from tests.layers.bench import LayerBench, backward, forward, run_updates

IMPLEMENTATIONS: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    # Arguments, shape of x, and whether the moving variance has Bessel's correction.
    "fused, rank 2": ({}, (20, 3), True),
    "fused, rank 4": ({"zero_debias_moving_mean": True}, (5, 2, 2, 3), True),
    "fused, in place": ({"updates_collections": None}, (5, 2, 2, 3), True),
    "core fused, rank 4": ({}, (5, 2, 2, 3), True),
    "core fused, rank 4, NCHW": ({"data_format": "NCHW"}, (5, 3, 2, 2), True),
    "core fused, rank 5": ({}, (5, 2, 2, 1, 3), True),
    "core, rank 2": ({"fused": False}, (20, 3), False),
    "core, rank 3": ({}, (5, 4, 3), False),
    "core, rank 4": ({"fused": False}, (5, 2, 2, 3), False),
    "legacy, rank 3": ({"updates_collections": None}, (5, 4, 3), False),
    "legacy, rank 4": ({"fused": False, "updates_collections": "mine"}, (5, 2, 2, 3), False),
    "legacy, zero_debias": ({"fused": False, "zero_debias_moving_mean": True}, (20, 3), False),
}


def images(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(3, 2, shape).astype(np.float32)


def moments(x: np.ndarray, arguments: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    channels_first = arguments.get("data_format") == "NCHW"
    wide = np.moveaxis(x.astype(np.float64), 1, -1) if channels_first else x.astype(np.float64)
    axes = tuple(range(x.ndim - 1))
    return wide.mean(axes), wide.var(axes)


@pytest.mark.parametrize(("arguments", "shape", "is_corrected"), IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
@pytest.mark.parametrize("zero_debias", [False, True], ids=["", "zero_debias"])
def test_ten_updates_by_one_batch(
    arguments: dict[str, Any], shape: tuple[int, ...], is_corrected: bool, zero_debias: bool
) -> None:
    """With decay 0.1 they are the batch's: what is left of the start is 1e-10 of it."""
    given = {**arguments, "decay": 0.1}
    if zero_debias:
        given["zero_debias_moving_mean"] = True
    if zero_debias and len(shape) in (3, 5):
        is_corrected = False  # then it is the legacy one
    layer, x = LayerBench().layer(**given), images(shape)
    mean, variance = moments(x, arguments)
    count = x.size // 3
    for update in range(10):
        forward(layer, x, keep_for_backward=False)
        run_updates(layer)
        if given.get("zero_debias_moving_mean"):
            found = layer.get_variables(["moving_mean", "moving_mean/local_step"])
            np.testing.assert_allclose(found["moving_mean"], mean, rtol=1e-5)
            assert found["moving_mean/local_step"] == update + 1
    found = layer.get_variables(())
    np.testing.assert_allclose(found["moving_mean"], mean, rtol=1e-5)
    corrected = variance * count / (count - 1) if is_corrected else variance
    np.testing.assert_allclose(found["moving_variance"], corrected, rtol=1e-5)
    if given.get("zero_debias_moving_mean"):
        np.testing.assert_allclose(found["moving_mean/biased"], mean, rtol=1e-5)


@pytest.mark.parametrize(("arguments", "shape", "_"), IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
def test_inference(arguments: dict[str, Any], shape: tuple[int, ...], _: bool) -> None:
    """(9 - 5) / sqrt(4) * 2 + 5 = 9, and no update."""
    first = {"beta": 5.0, "gamma": 2.0, "moving_mean": 5.0, "moving_variance": 4.0}
    initializers = {name: np.full(3, value) for name, value in first.items()}
    layer = LayerBench().layer(**arguments, scale=True, epsilon=0.0, param_initializers=initializers)
    x = np.full(shape, 9, np.float32)
    for _turn in range(3):
        made = forward(layer, x, False)
        np.testing.assert_allclose(made.outputs, x, rtol=1e-6)
        assert not made.has_pending_updates
        assert run_updates(layer) == layer.num_updates == 0
    found = layer.get_variables(list(first))
    assert {name: set(value) for name, value in found.items()} == {name: {value} for name, value in first.items()}


@pytest.mark.parametrize(("arguments", "shape", "_"), IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
def test_a_layer_that_is_not_trainable(arguments: dict[str, Any], shape: tuple[int, ...], _: bool) -> None:
    """It normalises by the batch all the same; tf.layers leaves its averages alone, the others move them."""
    layer, x = LayerBench().layer(**arguments, trainable=False, decay=0.5), images(shape)
    made = forward(layer, x)
    run_updates(layer)
    is_left_alone = made.implementation.name.startswith("CORE")
    assert layer.num_updates == (0 if is_left_alone else 1)
    assert any(ignored.argument == "updates_collections" for ignored in made.ignored) == is_left_alone
    mean, variance = moments(made.outputs, arguments)
    np.testing.assert_allclose(mean, 0, atol=1e-6)
    np.testing.assert_allclose(variance, 1, rtol=1e-3)
    assert np.any(backward(layer, made.forward_id, np.ones_like(x)).beta_gradient)


@pytest.mark.parametrize(("arguments", "shape", "_"), IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
@pytest.mark.parametrize("axis", ["no items", "no pixels"])
def test_an_empty_batch(arguments: dict[str, Any], shape: tuple[int, ...], _: bool, axis: str) -> None:
    empty = (0, *shape[1:])
    if axis == "no pixels" and len(shape) > 2:
        empty = (*shape[:2], 0, *shape[3:]) if arguments.get("data_format") == "NCHW" else (shape[0], 0, *shape[2:])
    layer = LayerBench().layer(**arguments, scale=True)
    made = forward(layer, np.zeros(empty, np.float32))
    assert made.outputs.shape == empty
    assert run_updates(layer) == layer.num_updates == 0
    found = layer.get_variables(())
    assert (set(found["moving_mean"]), set(found["moving_variance"])) == ({0.0}, {1.0})
    gradients = backward(layer, made.forward_id, np.zeros(empty, np.float32))
    assert gradients.inputs_gradient.shape == empty
    assert not np.any(gradients.beta_gradient)
    assert not np.any(gradients.gamma_gradient)


def test_one_item() -> None:
    """Its variance is 0, so the outputs are beta; the moving variance shrinks."""
    layer = LayerBench().layer(decay=0.5, param_initializers={"beta": np.array([1.0, 2.0, 3.0])})
    made = forward(layer, np.array([[7, 8, 9]], np.float32))
    run_updates(layer)
    np.testing.assert_array_equal(made.outputs, [[1, 2, 3]])
    np.testing.assert_array_equal(layer.get_variables(["moving_variance"])["moving_variance"], [0.5] * 3)


def test_weights_of_zero_alone() -> None:
    """No moments: what is divided by nothing is 0."""
    layer, x = LayerBench().layer(decay=0.5, epsilon=0.25), images((4, 3))
    made = forward(layer, x, True, np.zeros(4, np.float32))
    run_updates(layer)
    np.testing.assert_allclose(made.outputs, x / 0.5, rtol=1e-6)
    assert set(layer.get_variables(["moving_variance"])["moving_variance"]) == {0.5}
    gradients = backward(layer, made.forward_id, np.ones_like(x))
    np.testing.assert_allclose(gradients.inputs_gradient, np.full_like(x, 2), rtol=1e-6)
    assert not np.any(gradients.batch_weights_gradient)


EPSILON, DECAY, RENORM_DECAY = 0.01, 0.7, 0.6


@dataclass
class Renorm:
    """Batch Renormalization of shape [N, C] in float64, as the documents of its two forms have it."""

    is_old: bool
    clipping: Mapping[str, float]

    def __post_init__(self) -> None:
        zero, one = np.zeros(3), np.ones(3)
        self.mean, self.stddev = (zero, zero) if self.is_old else (zero, one)
        self.mean_weight = self.stddev_weight = 0.0
        self.moving_mean, self.moving_variance, self.moving_stddev = zero, one, one

    def correction(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mu, sd = x.mean(0), np.sqrt(x.var(0) + EPSILON)
        if self.is_old:
            mean = self.mean + (1 - self.mean_weight) * mu
            stddev = self.stddev + (1 - self.stddev_weight) * sd
        else:
            mean, stddev = self.mean, np.maximum(self.stddev, EPSILON**0.5)
        r, d = sd / stddev, (mu - mean) / stddev
        r = np.minimum(np.maximum(r, self.clipping.get("rmin", 0)), self.clipping.get("rmax", np.inf))
        dmax = self.clipping.get("dmax", np.inf)
        return r, np.clip(d, -dmax, dmax)

    def update(self, x: np.ndarray) -> None:
        mu, sd = x.mean(0), np.sqrt(x.var(0) + EPSILON)
        self.mean = self.mean * RENORM_DECAY + mu * (1 - RENORM_DECAY)
        self.stddev = self.stddev * RENORM_DECAY + sd * (1 - RENORM_DECAY)
        if self.is_old:
            self.mean_weight = self.mean_weight * RENORM_DECAY + 1 - RENORM_DECAY
            self.stddev_weight = self.stddev_weight * RENORM_DECAY + 1 - RENORM_DECAY
            mu, sd = self.mean / self.mean_weight, self.stddev / self.stddev_weight
            self.moving_variance = self.moving_variance * DECAY + (sd**2 - EPSILON) * (1 - DECAY)
        else:
            self.moving_stddev = self.moving_stddev * DECAY + sd * (1 - DECAY)
            self.moving_variance = np.maximum(self.moving_stddev**2 - EPSILON, 0)
        self.moving_mean = self.moving_mean * DECAY + mu * (1 - DECAY)

    def variables(self) -> dict[str, Any]:
        """Returns what the layer is to have."""
        found = {
            "moving_mean": self.moving_mean,
            "moving_variance": self.moving_variance,
            "renorm_mean": self.mean,
            "renorm_stddev": self.stddev,
        }
        if self.is_old:
            return found | {"renorm_mean_weight": self.mean_weight, "renorm_stddev_weight": self.stddev_weight}
        return found | {"moving_stddev": self.moving_stddev}


def output(x: np.ndarray, r: np.ndarray, d: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    result: np.ndarray = ((x - x.mean(0)) / np.sqrt(x.var(0) + EPSILON) * r + d) * gamma + beta
    return result


@dataclass
class Renormalized:
    """What an output is a function of; r and d are constants."""

    x: np.ndarray
    r: np.ndarray
    d: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray

    def __call__(self, **changes: np.ndarray) -> np.ndarray:
        return output(**(vars(self) | changes))


def check_gradients(found: BackwardOutputs, dy: np.ndarray, function: Renormalized) -> None:
    gradients = {"x": found.inputs_gradient, "gamma": found.gamma_gradient, "beta": found.beta_gradient}
    for name, gradient in gradients.items():
        slope = slope_of(
            partial(lambda name, value: np.sum(dy * function(**{name: value})), name), vars(function)[name]
        )
        np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-5, err_msg=name)


def slope_of(loss: Any, at: np.ndarray) -> np.ndarray:
    """Returns the gradient of a function of one array, by central differences."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[index] = 1e-5
        gradient[index] = (loss(at + step) - loss(at - step)) / 2e-5
    return gradient


CLIPPINGS: dict[str, dict[str, float]] = {
    "not clipped": {},
    "clipped": {"rmax": 1.1, "rmin": 0.9, "dmax": 0.2},
    "one bound": {"rmax": 1.05},
    "bounds that cross": {"rmin": 1.3, "rmax": 1.2},
}


def renorm_layer(is_old: bool, clipping: Mapping[str, float], **arguments: Any) -> BatchNormLayer:
    return LayerBench().layer(
        renorm=True,
        renorm_zero_debias=is_old,
        renorm_clipping=dict(clipping),
        renorm_decay=RENORM_DECAY,
        decay=DECAY,
        epsilon=EPSILON,
        scale=True,
        **arguments,
    )


@pytest.mark.parametrize("clipping", CLIPPINGS.values(), ids=list(CLIPPINGS))
@pytest.mark.parametrize("is_old", [False, True], ids=["", "old form"])
def test_ten_steps_of_renorm(is_old: bool, clipping: dict[str, float]) -> None:
    """float64, so that only the rounding of 1 - decay to float32 is between them; r and d have no gradient."""
    random = np.random.default_rng(3)
    gamma, beta = random.uniform(0.5, 2, 3), random.normal(size=3)
    layer = renorm_layer(is_old, clipping, param_initializers={"gamma": gamma, "beta": beta})
    expected = Renorm(is_old, clipping)
    was_clipped = 0
    for step in range(10):
        x, dy = random.normal(step / 2, 1 + step / 5, (6, 3)), random.normal(size=(6, 3))
        made = forward(layer, x)
        r, d = expected.correction(x)
        was_clipped += int(np.count_nonzero(np.isin(r, list(clipping.values()))))
        np.testing.assert_allclose(made.outputs, output(x, r, d, gamma, beta), rtol=1e-6, atol=1e-6)
        check_gradients(backward(layer, made.forward_id, dy), dy, Renormalized(x, r, d, gamma, beta))
        assert run_updates(layer) == 1
        expected.update(x)
        variables = layer.get_variables(list(expected.variables()))
        for name, value in expected.variables().items():
            np.testing.assert_allclose(variables[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    assert bool(was_clipped) == bool(clipping)
    x = random.normal(size=(6, 3))
    normal = (x - expected.moving_mean) / np.sqrt(expected.moving_variance + EPSILON)
    np.testing.assert_allclose(forward(layer, x, False).outputs, normal * gamma + beta, rtol=1e-5, atol=1e-5)


def test_the_first_step_of_renorm() -> None:
    """The averages are 0 and 1: r is the deviation, d the mean, so the inputs come out as they are."""
    x = images((50, 3))
    made = forward(renorm_layer(False, {}), x)
    np.testing.assert_allclose(made.outputs, x, rtol=1e-4, atol=1e-4)
    # In the old form they are the batch's: r is 1 and d is 0.
    made = forward(renorm_layer(True, {}), x)
    np.testing.assert_allclose(
        made.outputs, output(x, np.array(1), np.array(0), np.array(1), np.array(0)), rtol=1e-4, atol=1e-4
    )


def test_the_mean_of_zero_debias_is_that_of_all_batches() -> None:
    """Weighted by decay to the power of their age, and the weights divided by their sum."""
    layer, decay = LayerBench().layer(decay=0.9, zero_debias_moving_mean=True, fused=False), 0.9
    means: list[float] = []
    for number in range(30):
        means.append(float(number**2))
        forward(layer, np.full((2, 3), means[-1]), keep_for_backward=False)
        run_updates(layer)
        weights = decay ** np.arange(len(means))[::-1]
        expected = np.average(means, weights=weights)
        np.testing.assert_allclose(layer.get_variables(["moving_mean"])["moving_mean"], [expected] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "rate"),
    {
        (4, 1): np.float32(1 - 0.999),
        (4, 2, 1): np.float32(1 - 0.999),
        (4, 2, 2, 1): np.float32(1) - np.float32(0.999),
        (4, 2, 2, 2, 1): np.float32(1) - np.float32(0.999),
    }.items(),
    ids=str,
)
def test_the_core_fused_layer_rounds_decay(shape: tuple[int, ...], rate: np.float32) -> None:
    """1.3e-5 of the default's 1 - decay, and so of averages that begin at zero."""
    layer = LayerBench().layer()
    forward(layer, np.ones(shape, np.float32))
    run_updates(layer)
    assert layer.variables is not None
    assert layer.variables.averages.moving_mean[0] == rate
