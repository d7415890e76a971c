"""What the served ops compute, in JAX's own operations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def layer_norm(x: Any, scale: Any, offset: Any) -> Any:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + offset


def batch_norm(x: Any, scale: Any, offset: Any, *, axes: tuple[int, ...] = (0, 1, 2)) -> Any:
    mean = x.mean(axis=axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=axes, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-4) * _along(scale, axes) + _along(offset, axes)


def batch_norm_moments(x: Any, scale: Any, offset: Any, *, factor: float, axes: tuple[int, ...] = (0, 1, 2)) -> Any:
    """All outputs, for a moving mean of 0 and a moving variance of 1."""
    variance = 1 - factor + factor * x.var(axis=axes, ddof=1)
    return batch_norm(x, scale, offset, axes=axes), factor * x.mean(axis=axes), variance


def batch_norm_inference(x: Any, scale: Any, offset: Any, *, mean: Any, variance: Any) -> Any:
    return (x - mean) / jnp.sqrt(variance + 1e-4) * scale + offset


def gru_block_cell(x: Any, h: Any, w_ru: Any, w_c: Any, b_ru: Any, b_c: Any) -> Any:
    r, u = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, h], axis=1) @ w_ru + b_ru), 2, axis=1)
    c = jnp.tanh(jnp.concatenate([x, h * r], axis=1) @ w_c + b_c)
    return u * h + (1 - u) * c


def lstm(x: Any, h: Any, c: Any, params: Any) -> Any:
    """One layer in one direction; returns the output and the last states."""
    weights, biases = _weights(params, 4, x.shape[-1], h.shape[-1])

    def step(state: Any, row: Any) -> Any:
        h, c = state
        i, f, new, o = jnp.split(row @ weights[0].T + h @ weights[1].T + biases.sum(0), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(new)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    (h, c), output = jax.lax.scan(step, (h[0], c[0]), x)
    return output, h[None], c[None]


def gru(x: Any, h: Any, params: Any) -> Any:
    """One layer in one direction; returns the output and the last state."""
    weights, biases = _weights(params, 3, x.shape[-1], h.shape[-1])

    def step(h: Any, row: Any) -> Any:
        of_x, of_h = (part @ w.T + b for part, w, b in zip((row, h), weights, biases, strict=True))
        r, z, new = zip(*(jnp.split(each, 3, axis=-1) for each in (of_x, of_h)), strict=True)
        z = jax.nn.sigmoid(sum(z))
        h = (1 - z) * jnp.tanh(new[0] + jax.nn.sigmoid(sum(r)) * new[1]) + z * h
        return h, h

    h, output = jax.lax.scan(step, h[0], x)
    return output, h[None]


batch_norm_channels_first = partial(batch_norm, axes=(0, 2, 3))


def _along(values: Any, axes: tuple[int, ...]) -> Any:
    return jnp.expand_dims(values, axes)


def _weights(params: Any, gates: int, size: int, units: int) -> tuple[tuple[Any, Any], Any]:
    """Splits the parameter vector of one layer as docs/cudnn_rnn.md lays it out."""
    of_x, of_h = gates * units * size, gates * units * units
    w, r, biases = jnp.split(params, [of_x, of_x + of_h])
    return (w.reshape(-1, size), r.reshape(-1, units)), biases.reshape(2, -1)
