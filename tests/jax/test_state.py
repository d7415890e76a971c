"""What a worker with JAX remembers arrives at one that joins as it was."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradserve
from gradserve.jax.training_state import restored, state_of
from gradserve.training.state import Arrived, Carried
from tests.jax.runs import JaxWorker

LEAVES: dict[str, Any] = {
    "float8": jnp.asarray([1.5, -2.0], jnp.float8_e4m3fn),
    "bfloat16": jnp.asarray([1.5, -0.0], jnp.bfloat16),
    "complex numbers": jnp.asarray([1 + 2j]),
    "a count": jnp.asarray(3, jnp.int32),
    "flags": jnp.asarray([True, False]),
    "a key": jax.random.key(7),
    "infinite": jnp.asarray([jnp.inf, jnp.nan]),
    "a large integer": (1 << 62) + 1,
    "a number": 0.1,
    "a flag": True,
    "an array of NumPy": np.asarray([(1 << 60) + 1, -1]),
}


def emptied(leaf: Any) -> Any:
    """Returns a leaf of the same kind with other values, as a worker that begins has it."""
    if isinstance(leaf, bool | int | float):
        return type(leaf)(0)
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return jax.random.key(0) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)


def test_every_kind_of_leaf() -> None:
    state = state_of({"w": jnp.ones(2)}, LEAVES, is_copy=False)
    received = Arrived.of(Carried.of(state).gradient()).state
    params, arrived = restored(received, {"w": jnp.zeros(2)}, {key: emptied(each) for key, each in LEAVES.items()})
    assert params["w"].tolist() == [1.0, 1.0]
    for key, expected in LEAVES.items():
        leaf = arrived[key]
        assert type(leaf) is type(expected), key
        if isinstance(expected, jax.Array) and jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            leaf, expected = jax.random.key_data(leaf), jax.random.key_data(expected)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected), strict=True, err_msg=key)


@pytest.mark.parametrize(
    ("own", "given"),
    [(jnp.zeros(2, jnp.float32), np.ones(2)), (jnp.zeros(2, jnp.bfloat16), np.ones(2, np.float32))],
    ids=["float64 with x64 elsewhere", "another precision"],
)
def test_values_that_would_be_rounded(own: Any, given: Any) -> None:
    state = state_of({}, {"mu": given}, is_copy=False)
    with pytest.raises(gradserve.InvalidArgumentError, match=r"'optimizer/mu' of dtype .*, got float.*the same model"):
        restored(state, {}, {"mu": own})


def test_a_copy_for_others_that_fails_is_their_problem(
    client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = JaxWorker(client, name, donate=True).begin()
    monkeypatch.setattr("gradserve.jax.transformation.state_of", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(worker.averaging, "_copies_end", math.inf)  # somebody has asked
    worker.update(0).catch_up()
    with pytest.raises(ZeroDivisionError):
        worker.averaging._state_for_others()
    worker.averaging.close()
