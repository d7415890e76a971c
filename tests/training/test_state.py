"""The state of a worker arrives as it was sent."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple

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
from gradserve.training.state import Carried, as_json, from_json

DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
NO_NUMBERS: Any = object()


@st.composite
def tensors(draw: st.DrawFn) -> NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    return draw(arrays.arrays(dtype, shape, elements=arrays.from_dtype(dtype)))


def map_steps(client: gradserve.Client, name: str, state: State) -> tuple[State, int]:
    """Returns what another worker receives."""
    Joining(client, name, "", "sender").answer(Carried.of(state), 7)
    received = Joining(client, name, "", "receiver").receive(None, lambda _step: True)
    return received.state, received.step


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(tensors(), min_size=1, max_size=3))
def test_tensors(client: gradserve.Client, name: str, sent: list[NDArray[Any]]) -> None:
    state, step = map_steps(client, name, State({f"layer/{number}": each for number, each in enumerate(sent)}))
    assert step == 7
    for number, each in enumerate(sent):
        received = np.asarray(state.tensors[f"layer/{number}"])
        assert (received.dtype, received.shape) == (each.dtype, each.shape)
        assert np.array_equal(received, each, equal_nan=each.dtype.kind in "fc")
        if each.dtype.kind == "f":
            assert np.array_equal(np.signbit(received[received == 0]), np.signbit(each[each == 0]))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "int4"]
)
def test_dtypes_that_numpy_has_not_by_itself(client: gradserve.Client, name: str, dtype: str) -> None:
    sent = np.array([1.5, 0.25, 3.0, 1e-40]).astype(np.dtype(getattr(ml_dtypes, dtype))).reshape(2, 2)
    received = np.asarray(map_steps(client, name, State({"w": sent}))[0].tensors["w"])
    assert (received.dtype, received.shape, received.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())


@pytest.mark.exhaustive
def test_more_tensors_than_an_accumulator_has_components(client: gradserve.Client, name: str) -> None:
    sent = {f"layer/{number}": np.full(1, number, np.float32) for number in range((1 << 16) + 1)}
    received = map_steps(client, name, State(sent))[0].tensors
    assert list(received) == list(sent)
    assert all(float(np.asarray(each)[0]) == number for number, each in enumerate(received.values()))


@dataclass(frozen=True)
class Phase:
    """What a schedule may remember."""

    end: int
    rates: tuple[float, ...]


class Pair(NamedTuple):
    """A tuple with names."""

    low: float
    high: float


class Kind(enum.Enum):
    """A choice."""

    LINEAR = 1


@dataclass
class Annotated:
    """One to which a program adds what is no field."""

    end: int


def with_more() -> Annotated:
    made = Annotated(1)
    vars(made)["start"] = 0
    return made


def a_cycle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


SURVIVES: dict[str, Any] = {
    "nothing": {},
    "what JSON knows": {"groups": [{"lr": 0.1, "betas": [0.9, 0.999], "name": "größe", "x": None, "y": True}]},
    "a text that is no UTF-8": {"x": "\ud800"},
    "integers as keys": {"x": {4: 1, -1: {8: 2}}},
    "keys of several types": {"x": {1: "a", "1": "b", (1, "c"): 0.5, None: 1, 2.5: 2}},
    "the key that is used inside": {"x": {"": ["tuple", []], "a": {"": 1}}},
    "tuples": {"x": (0.9, 0.999, ())},
    "a Counter": {"milestones": Counter({4: 1, 8: 2})},
    "mappings": {
        "x": OrderedDict([("b", 1), ("a", 2)]),
        "y": defaultdict(list, {3: [1]}),
        "z": defaultdict(None, {1: 2}),
    },
    "sets": {"x": {1, 2}, "y": frozenset({"a"}), "z": {(1, 2)}},
    "a deque": {"x": deque([1, 2], maxlen=3)},
    "large integers": {"x": (1 << 53) + 1, "y": -(1 << 64)},
    "special numbers": {"x": [math.inf, -math.inf, -0.0, 1e-320, 0.1 + 0.2], "y": 1 - 2j},
    "bytes": {"x": b"\x00\xff", "y": bytearray(b"abc")},
    "NumPy's numbers": {"x": np.float32(0.1), "y": np.int64(3), "z": np.bool_(True), "b": ml_dtypes.bfloat16(1.5)},
    "a dataclass": {"x": [Phase(3, (0.1, 0.2))]},
    "a named tuple": {"x": Pair(0.0, 1.0)},
    "a choice": {"x": Kind.LINEAR},
}


@pytest.mark.parametrize("metadata", list(SURVIVES.values()), ids=list(SURVIVES))
def test_metadata(client: gradserve.Client, name: str, metadata: dict[str, Any]) -> None:
    received = map_steps(client, name, State({"w": np.zeros(1, np.float32)}, metadata))[0].metadata
    assert received == metadata
    assert repr(received) == repr(metadata)  # which tells types


def test_metadata_without_equality_or_notation(client: gradserve.Client, name: str) -> None:
    metadata = {"x": math.nan, "y": np.arange(6.0).reshape(2, 3), "z": -(1 << 20_000)}
    received = map_steps(client, name, State({"w": np.zeros(1, np.float32)}, metadata))[0].metadata
    assert math.isnan(received["x"])
    np.testing.assert_array_equal(received["y"], metadata["y"], strict=True)
    assert received["z"] == metadata["z"]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.recursive(PLAIN, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=3)


@given(st.recursive(HASHABLE, lambda inner: st.lists(inner) | st.dictionaries(HASHABLE, inner) | st.tuples(inner)))
def test_any_value_comes_back(value: Any) -> None:
    assert from_json(json.loads(json.dumps(as_json(value, "x")))) == value


REFUSED_VALUES: dict[str, tuple[Any, str]] = {
    "a function": ({"lr_lambda": print}, r"metadata\['lr_lambda'\] is <built-in function print>"),
    "an object": ({"groups": [{"by": NO_NUMBERS}]}, r"metadata\['groups'\]\[0\]\['by'\] is <object"),
    "a key": ({"x": {NO_NUMBERS: 1}}, r"key <object.* of metadata\['x'\]"),
    "a list of a type of its own": ({"x": type("Own", (list,), {})()}, r"metadata\['x'\]"),
    "a dataclass in a function": ({"x": make_dataclass("Local", ["a"])(1)}, "no name in its module"),
    "a dataclass with more": ({"x": with_more()}, "more, or less, than the fields"),
    "what a defaultdict calls": ({"x": defaultdict(with_more)}, r"default_factory of metadata\['x'\]"),
    "a cycle": ({"x": a_cycle()}, "contains itself"),
    "dates": ({"x": np.datetime64(1, "s")}, "dtype datetime64"),
}


@pytest.mark.parametrize(("metadata", "message"), list(REFUSED_VALUES.values()), ids=list(REFUSED_VALUES))
def test_metadata_that_cannot_travel(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=message):
        Carried.of(State({}, metadata))


@pytest.mark.parametrize(
    "title", [("os", "system"), ("subprocess", "Popen"), ("no.such.module", "X"), ("json", "JSONDecoder")]
)
def test_what_is_received_calls_nothing(title: tuple[str, str]) -> None:
    for kind, content in (("dataclass", {}), ("namedtuple", []), ("enum", "X")):
        with pytest.raises(gradserve.InvalidArgumentError, match="has not loaded"):
            from_json({"": [kind, [*title, content]]})


def test_a_dataclass_that_has_other_fields_here() -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=r"a Phase with fields \['start'\]"):
        from_json({"": ["dataclass", [__name__, "Phase", {"start": 1}]]})


def test_what_cannot_travel() -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=r"tensors\['t'\]"):
        Carried.of(State({"t": NO_NUMBERS}))


def test_the_copy_stays_as_it_was() -> None:
    weights = np.zeros(3, np.float32)
    carried = Carried.of(State({"w": weights}))
    weights += 1
    assert not carried.components["float32"].any()
