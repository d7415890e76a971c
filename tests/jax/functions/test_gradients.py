"""The served functions and their gradients, beside JAX's own mathematics and finite differences."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import gradserve
from gradserve.jax import functions
from tests.jax.functions import mathematics

MEAN, VARIANCE = np.linspace(-1, 1, 3), np.linspace(1, 2, 3)


@dataclass(frozen=True)
class Case:
    """A served function, what it computes, and the shapes of its inputs."""

    served: Callable[..., Any]
    mathematics: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, dtype: Any) -> list[Any]:
        random = np.random.default_rng(0)
        return [jnp.asarray(random.uniform(-1, 1, shape), dtype) for shape in self.shapes]


def rnn(client: gradserve.Client, *arrays: Any, rnn_mode: str) -> Any:
    if rnn_mode == "lstm":
        return tuple(functions.cudnn_rnn(client, *arrays))
    x, h, params = arrays
    return tuple(functions.cudnn_rnn(client, x, h, None, params, rnn_mode=rnn_mode))[:2]


def batch_norm(client: gradserve.Client, *arrays: Any, **options: Any) -> Any:
    return functions.fused_batch_norm(client, *arrays, **options).y


def batch_norm_moments(
    client: gradserve.Client, x: Any, scale: Any, offset: Any, *, factor: float, data_format: str = "NHWC"
) -> Any:
    moving = (jnp.zeros_like(scale), jnp.ones_like(scale))
    options: dict[str, Any] = {"exponential_avg_factor": factor, "data_format": data_format}
    return tuple(functions.fused_batch_norm(client, x, scale, offset, *moving, **options))


def batch_norm_inference(client: gradserve.Client, x: Any, scale: Any, offset: Any) -> Any:
    population = (jnp.asarray(each, scale.dtype) for each in (MEAN, VARIANCE))
    return functions.fused_batch_norm(client, x, scale, offset, *population, is_training=False).y


CASES = {
    "layer norm": Case(functions.layer_norm, mathematics.layer_norm, ((2, 4, 5), (5,), (5,))),
    "batch norm": Case(batch_norm, mathematics.batch_norm, ((2, 3, 2, 3), (3,), (3,))),
    "batch norm, channels first": Case(
        partial(batch_norm, data_format="NCHW"), mathematics.batch_norm_channels_first, ((2, 3, 2, 3), (3,), (3,))
    ),
    "batch norm, with moments": Case(
        partial(batch_norm_moments, factor=0.25),
        partial(mathematics.batch_norm_moments, factor=0.25),
        ((2, 3, 2, 3), (3,), (3,)),
    ),
    "batch norm, channels first, with moments": Case(
        partial(batch_norm_moments, factor=1.0, data_format="NCDHW"),
        partial(mathematics.batch_norm_moments, factor=1.0, axes=(0, 2, 3, 4)),
        ((2, 3, 2, 1, 3), (3,), (3,)),
    ),
    "batch norm, inference": Case(
        batch_norm_inference,
        lambda *inputs: mathematics.batch_norm_inference(*inputs, mean=MEAN, variance=VARIANCE),
        ((2, 3, 2, 3), (3,), (3,)),
    ),
    "gru cell": Case(
        functions.gru_block_cell, mathematics.gru_block_cell, ((3, 2), (3, 4), (6, 8), (6, 4), (8,), (4,))
    ),
    "lstm": Case(partial(rnn, rnn_mode="lstm"), mathematics.lstm, ((4, 2, 3), (1, 2, 5), (1, 2, 5), (200,))),
    "gru": Case(partial(rnn, rnn_mode="gru"), mathematics.gru, ((4, 2, 3), (1, 2, 5), (150,))),
}
every_case = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
COMPILED = ("layer norm", "gru cell", "lstm")
"""Cases that are compiled in float64; the others are in float32, as compiling takes most of the time."""
WAYS = {f"{name}, eager": (case, lambda function: function) for name, case in CASES.items()}
WAYS |= {f"{name}, jit": (CASES[name], jax.jit) for name in COMPILED}


def loss(function: Callable[..., Any], *inputs: Any) -> Any:
    """A scalar in which no output has the same weight at two places."""
    outputs = jax.tree.leaves(function(*inputs))
    return sum((each * jnp.cos(jnp.arange(each.size, dtype=each.dtype)).reshape(each.shape)).sum() for each in outputs)


@pytest.mark.parametrize(("case", "compile_it"), list(WAYS.values()), ids=list(WAYS))
def test_float64_is_jax_s_own(client: gradserve.Client, case: Case, compile_it: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        inputs = case.inputs(jnp.float64)
        every = tuple(range(len(inputs)))
        served = compile_it(jax.value_and_grad(partial(loss, partial(case.served, client)), every))(*inputs)
        expected = jax.value_and_grad(partial(loss, case.mathematics), every)(*inputs)
    for actual, wanted in zip(jax.tree.leaves(served), jax.tree.leaves(expected), strict=True):
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        # Sums of at most 100 terms of magnitude 1, rounded at 1e-16 each, through a few operations.
        np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", [CASES[name] for name in CASES if name not in COMPILED])
def test_float32_under_jit(client: gradserve.Client, case: Case) -> None:
    inputs = case.inputs(jnp.float32)
    served = jax.jit(partial(case.served, client))(*inputs)
    expected = case.mathematics(*inputs)
    for actual, wanted in zip(jax.tree.leaves(served), jax.tree.leaves(expected), strict=True):
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


MOMENTS = {
    "mean": (lambda norm: norm.batch_mean, lambda x: x.mean((0, 1, 2))),
    "variance": (lambda norm: norm.batch_variance, lambda x: x.var((0, 1, 2), ddof=1)),
}


@pytest.mark.parametrize(("served", "expected"), list(MOMENTS.values()), ids=list(MOMENTS))
def test_a_loss_of_moments_alone(
    client: gradserve.Client, served: Callable[[Any], Any], expected: Callable[[Any], Any]
) -> None:
    (x,) = CASES["batch norm"].inputs(jnp.float32)[:1]
    actual = jax.grad(lambda x: (served(functions.fused_batch_norm(client, x, jnp.ones(3), jnp.zeros(3))) ** 2).sum())(
        x
    )
    np.testing.assert_allclose(actual, jax.grad(lambda x: (expected(x) ** 2).sum())(x), rtol=1e-5, atol=1e-7)


@every_case
def test_finite_differences(client: gradserve.Client, case: Case) -> None:
    with jax.enable_x64(True):
        check_grads(partial(case.served, client), case.inputs(jnp.float64), order=1, modes=["rev"], eps=1e-5)
