"""The state of a worker arrives as it was sent."""

from typing import Any

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import gradserve
from gradserve.training import State
from gradserve.training.joining import Joining
from gradserve.training.state import Carried

DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
]
NO_NUMBERS: Any = object()
EXACT = st.integers(-(1 << 53), 1 << 53)


def values(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    """Returns all that can travel, in a dtype."""
    if dtype.kind not in "iu" or dtype.itemsize < 8:
        return arrays.from_dtype(dtype)
    return EXACT if dtype.kind == "i" else st.integers(0, 1 << 53)


@st.composite
def tensors(draw: st.DrawFn) -> NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    return draw(arrays.arrays(dtype, shape, elements=values(dtype)))


def passed_on(client: gradserve.Client, name: str, state: State) -> tuple[State, int]:
    """Returns what another worker receives."""
    Joining(client, name, "", "sender").answer(Carried.of(state), 7)
    received = Joining(client, name, "", "receiver").receive(None, lambda _step: True)
    return received.state, received.step


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(tensors(), min_size=1, max_size=3))
def test_tensors(client: gradserve.Client, name: str, sent: list[NDArray[Any]]) -> None:
    state, step = passed_on(client, name, State({f"layer/{number}": each for number, each in enumerate(sent)}))
    assert step == 7
    for number, each in enumerate(sent):
        received = np.asarray(state.tensors[f"layer/{number}"])
        assert (received.dtype, received.shape) == (each.dtype, each.shape)
        assert np.array_equal(received, each, equal_nan=each.dtype.kind == "f")
        if each.dtype.kind == "f":
            assert np.array_equal(np.signbit(received[received == 0]), np.signbit(each[each == 0]))


def test_bfloat16(client: gradserve.Client, name: str) -> None:
    sent = np.array([1.5, -0.0, np.inf, 1e-40], ml_dtypes.bfloat16)
    received = passed_on(client, name, State({"w": sent}))[0].tensors["w"]
    assert np.asarray(received).tobytes() == sent.tobytes()


@pytest.mark.parametrize("metadata", [{}, {"groups": [{"lr": 0.1, "betas": [0.9, 0.999], "name": "größe", "x": None}]}])
def test_metadata(client: gradserve.Client, name: str, metadata: dict[str, Any]) -> None:
    assert passed_on(client, name, State({"w": np.zeros(1, np.float32)}, metadata))[0].metadata == metadata


REFUSED: dict[str, tuple[State, str]] = {
    "an integer beyond 2^53": (State({"n": np.array([3, (1 << 53) + 1])}), r"'n' .* from 3 to 9007199254740993.*2\^53"),
    "a negative one": (State({"n": np.array(-(1 << 60))}), r"2\^53"),
    "complex numbers": (State({"c": np.zeros(2, np.complex64)}), "'c' .* complex64"),
    "no numbers": (State({"t": NO_NUMBERS}), r"tensors\['t'\]"),
}


@pytest.mark.parametrize(("state", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_cannot_travel(state: State, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=message):
        Carried.of(state)


def test_metadata_that_json_does_not_know(client: gradserve.Client, name: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="JSON"):
        passed_on(client, name, State({"w": np.zeros(1, np.float32)}, {"when": object()}))


def test_the_copy_stays_as_it_was() -> None:
    weights = np.zeros(3, np.float32)
    carried = Carried.of(State({"w": weights}))
    weights += 1
    assert not carried.tensors["w"].any()
