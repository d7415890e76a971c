"""Trees of values, their names, and back."""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import gradserve
from gradserve.conversion.trees import leaves_of, taken_apart
from gradserve_protocol.argument import Argument

TREE = Argument("components")
A, B, C = np.zeros(1), np.ones(2), np.ones((2, 3))


class Dense(NamedTuple):
    w: Any
    b: Any


class Empty(NamedTuple):
    pass


class FrozenDict(Mapping[str, Any]):
    """As Flax's."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


TREES: dict[str, tuple[Any, list[str]]] = {
    "a value": (A, [""]),
    "flat": ({"w": A, "b": B}, ["w", "b"]),
    "names with slashes": ({"layer/w": A}, ["layer/w"]),
    "nested": ({"layer1": {"w": A, "b": B}, "layer2": {"w": C}}, ["layer1/w", "layer1/b", "layer2/w"]),
    "lists and tuples": ([(A, B), [C]], ["0/0", "0/1", "1/0"]),
    "named tuples": (Dense(A, {"x": B}), ["w", "b/x"]),
    "layers without parameters": ([(A, B), (), Empty(), {}, None], ["0/0", "0/1"]),
    "integer keys": ({0: A, 1: B}, ["0", "1"]),
    "ordered": (OrderedDict(b=A, a=OrderedDict(c=B)), ["b", "a/c"]),
    "with defaults": (defaultdict(list, w=A), ["w"]),
    "read-only": (MappingProxyType({"w": A}), ["w"]),
    "frozen": ({"params": FrozenDict({"w": A})}, ["params/w"]),
    "numbers": ({"w": [1.0, 2.0], "b": 3}, ["w", "b"]),
    "rows of numbers": ([[[1, 2], (3, 4)], A], ["0", "1"]),
    "None": ({"w": A, "b": None}, ["w"]),
}


@pytest.mark.parametrize(("tree", "names"), TREES.values(), ids=TREES)
def test_a_tree_and_its_leaves(tree: Any, names: list[str]) -> None:
    leaves, structure = taken_apart(tree, TREE)
    assert list(leaves) == names
    assert leaves_of(tree, names, TREE) == leaves
    # Names of their own in place of the values: what is made of them must be like the tree.
    filled = structure.filled({name: name.upper() for name in names})
    assert_alike(filled, tree, iter(name.upper() for name in names))
    assert leaves_of(filled, names, TREE) == {name: name.upper() for name in names}


def assert_alike(made: Any, tree: Any, leaves: Iterator[str]) -> None:
    if isinstance(made, str):
        assert made == next(leaves)
        return
    assert type(made) is type(tree)
    if isinstance(tree, Mapping):
        assert list(made) == list(tree)
        for key in tree:
            assert_alike(made[key], tree[key], leaves)
    elif tree is not None:
        assert len(made) == len(tree)
        for ours, theirs in zip(made, tree, strict=True):
            assert_alike(ours, theirs, leaves)


def test_leaves_by_name_stand_for_the_tree() -> None:
    assert leaves_of({"a/b": A, "c": B}, ["a/b", "c"], TREE) == {"a/b": A, "c": B}


def test_leaves_may_be_missing_or_none() -> None:
    names = ["a/b", "a/c", "d"]
    assert leaves_of({"a": {"b": None}}, names, TREE) == {"a/b": None}
    assert leaves_of({"a": None, "d": A}, names, TREE) == {"d": A}
    assert leaves_of({"x": None}, names, TREE) == {}
    assert leaves_of(None, names, TREE) == {}


def test_a_leaf_may_be_a_list() -> None:
    assert leaves_of({"a": [A, B]}, ["a"], TREE) == {"a": [A, B]}


def endless() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["a"] = tree
    return tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({1.5: A}, "expected names as keys for components, got 1.5"),
        ({None: A}, "expected names as keys for components, got None"),
        ({True: A}, "expected names as keys for components, got True"),
        ({b"w": A}, "expected names as keys for components, got b'w'"),
        ({"\ud800": A}, "expected names as keys for components, got '\\ud800'"),
        ({"a/b": A, "a": {"b": B}}, "expected distinct names for components, got two values named 'a/b'"),
        ({1: A, "1": B}, "expected distinct names for components, got two values named '1'"),
        (endless(), "expected a tree of at most 64 levels for components, got more"),
    ],
)
def test_what_is_no_tree(tree: Any, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)) as raised:
        taken_apart(tree, TREE)
    assert raised.value.field == "components"


def test_lists_in_themselves_are_no_numbers() -> None:
    tree: list[Any] = [1.0]
    tree.append(tree)
    with pytest.raises(gradserve.InvalidArgumentError, match="at most 64 levels"):
        taken_apart(tree, TREE)


@pytest.mark.parametrize(
    ("tree", "got"),
    [
        ({"w": A, "x": B}, "'x'"),
        ({"w": A, "layer": {"x": B}}, "'layer/x'"),
        ({"layer": A}, "'layer'"),
        ({"layer": {"b": A, 0: B}}, "'layer/0'"),
        ({"x": [1.0, 2.0]}, "'x'"),
        (A, "ndarray"),
        ("abc", "str"),
    ],
)
def test_leaves_of_other_names(tree: Any, got: str) -> None:
    message = f"expected components ['layer/b', 'w'] for components, got {got}"
    with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)):
        leaves_of(tree, ["w", "layer/b"], TREE)
