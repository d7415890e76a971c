"""Files that take long begin early, in shares of their own, and no test is lost or run twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.suite import order
from tests.suite.order import TESTS


@dataclass(frozen=True)
class Item:
    path: Path
    number: int


LONG = dict(order.LONG)


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LONG", {"z.py": 30, "y.py": 20, "x.py": 10})


def items_of(**sizes: int) -> list[Any]:
    return [Item(TESTS / f"{name}.py", number) for name, size in sizes.items() for number in range(size)]


def ordered(items: Sequence[Any], num_workers: int) -> list[Any]:
    copy = list(items)
    order.long_ones_first(copy, num_workers)
    return copy


def test_what_takes_long_exists() -> None:
    assert [path for path in LONG if not (TESTS / path).exists()] == []


def test_each_share_begins_with_its_longest_file() -> None:
    items = items_of(a=50, b=50, x=2, y=2, z=2)
    names = [item.path.stem for item in ordered(items, 2)]
    first, second = names[:53], names[53:]
    assert first[:2] == ["z", "z"]
    assert second[:2] == ["y", "y"]
    assert first.count("x") + second.count("x") == 2


def test_the_last_half_of_a_share_has_none_of_them() -> None:
    names = [item.path.stem for item in ordered(items_of(a=94, x=2, y=2, z=2), 1)]
    assert names[:2] == ["z", "z"]
    assert names[2] == "a"
    assert set(names[60:]) == {"a"}


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize(
    "sizes", [{}, {"z": 40}, {"z": 40, "a": 3}, {"a": 50}, {"a": 7, "y": 1, "b": 30, "x": 3, "z": 9}]
)
def test_every_test_is_there_once(sizes: dict[str, int], num_workers: int) -> None:
    items = items_of(**sizes)
    done = ordered(items, num_workers)
    assert sorted(done, key=items.index) == items
    assert [item for item in done if item.path.stem == "a"] == [item for item in items if item.path.stem == "a"]


def test_tests_of_other_folders_are_short() -> None:
    items = [Item(Path("/elsewhere/z.py"), number) for number in range(5)]
    assert ordered(items, 2) == items
