"""Names in containers: what is found where, and pages of them by name."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.resources.lifetimes import Lifetimes
from gradserve_server.resources.registry import Directory, ResourceKey
from tests.layers.bench import LayerBench, forward, release


@dataclass
class Thing:
    incarnation: str


def directory_of(*names: str, container: str = "c") -> Directory[Thing]:
    lifetimes = Lifetimes(lambda: 0.0, 60.0)
    directory: Directory[Thing] = Directory("thing", lifetimes, lambda *_: None, article="a")
    for name in names:
        directory.add(ResourceKey(container, name), Thing(name))
    return directory


def names_of(directory: Directory[Thing], after: str = "", size: int = 100, *, prefix: str = "") -> list[str]:
    return [key.name for key, _ in directory.page("c", after, size, prefix=prefix)]


class TestDirectory:
    @pytest.mark.parametrize(
        ("after", "size", "prefix", "expected"),
        [
            ("", 100, "", ["B", "a", "a/b", "a/c", "ab", "b", "é"]),
            ("", 2, "", ["B", "a"]),
            ("a", 2, "", ["a/b", "a/c"]),
            ("a/bb", 1, "", ["a/c"]),
            ("é", 5, "", []),
            ("", 5, "a/", ["a/b", "a/c"]),
            ("a/b", 5, "a/", ["a/c"]),
            ("A", 1, "a/", ["a/b"]),
            ("b", 5, "a/", []),
            ("", 5, "c", []),
            ("", 0, "", []),
        ],
    )
    def test_a_page_is_by_name(self, after: str, size: int, prefix: str, expected: list[str]) -> None:
        directory = directory_of("b", "a/c", "a", "é", "ab", "B", "a/b")
        directory.add(ResourceKey("other", "a/a"), Thing("other"))
        assert names_of(directory, after, size, prefix=prefix) == expected

    def test_containers_are_their_own(self) -> None:
        directory = directory_of("a")
        assert directory.page("other", "", 5) == []
        directory.add(ResourceKey("other", "b"), Thing("1"))
        assert [str(key) for key, _ in directory.page("other", "", 5)] == ["other/b"]
        directory.remove(ResourceKey("other", "b"))
        assert (directory.page("other", "", 5), names_of(directory)) == ([], ["a"])

    def test_a_tag_fills_the_page(self) -> None:
        directory = directory_of()
        for number in range(100):
            directory.add(ResourceKey("c", f"{number:03}"), Thing(""), tags={str(number % 10), "all"})

        def page(tag: str) -> list[str]:
            return [key.name for key, _ in directory.page("c", "010", 3, tag=tag)]

        assert [page(tag) for tag in ("5", "all", "none")] == [["015", "025", "035"], ["011", "012", "013"], []]
        directory.remove(ResourceKey("c", "025"))
        directory.remove(ResourceKey("c", "012"))
        assert [page(tag) for tag in ("5", "all")] == [["015", "035", "045"], ["011", "013", "014"]]

    def test_any_order_of_additions_and_removals(self) -> None:
        shuffle, directory, there = random.Random(1), directory_of(), set[str]()
        for _ in range(2000):
            name = str(shuffle.randrange(60))
            key = ResourceKey("c", name)
            if name in there:
                assert directory.remove(key, "other") is None
                assert directory.remove(key) is not None
            else:
                assert directory.remove(key) is None
                directory.add(key, Thing(name))
            there ^= {name}
            assert names_of(directory) == sorted(there)
            assert sorted(key.name for key, _ in directory) == sorted(there)

    def test_what_is_taken_out_is_not_found(self) -> None:
        directory = directory_of("a")
        assert directory.get(ResourceKey("c", "a"), "a") is directory.find(ResourceKey("c", "a"))
        directory.remove(ResourceKey("c", "a"), "a")
        with pytest.raises(NotFoundError, match="no thing 'c/a'"):
            directory.get(ResourceKey("c", "a"))
        with pytest.raises(InvalidArgumentError, match="expected the name of a thing, got an empty one"):
            directory.find(ResourceKey("c", ""))


class TestManyLayers:
    """What is done for all layers looks at those alone that have something to do."""

    COUNT = 300

    @pytest.fixture
    def bench(self) -> LayerBench:
        bench = LayerBench()
        for number in range(self.COUNT):
            bench.layer(ResourceKey("c", f"{number:03}"))
        return bench

    def test_expiry_and_updates_look_at_layers_with_forwards(self, bench: LayerBench) -> None:
        layers = {number: bench.registry.get(ResourceKey("c", f"{number:03}")) for number in range(self.COUNT)}
        busy = {number: forward(layers[number], np.ones((2, 3), np.float32), lease=10) for number in (7, 70, 170)}
        looked_at: list[int] = []
        with ExitStack() as noted:
            for number, layer in layers.items():
                noted.enter_context(noting(layer, number, looked_at))
            assert bench.expire() == 0
            assert sorted(looked_at) == sorted(busy)
            assert asyncio.run(bench.registry.run_updates("c", "update_ops", ())) == 3
            assert set(looked_at) == set(busy)

    def test_those_that_lost_their_forwards_are_not_looked_at(self, bench: LayerBench) -> None:
        layer = bench.registry.get(ResourceKey("c", "007"))
        for _ in range(2):
            made = forward(layer, np.ones((2, 3), np.float32), lease=10)
            looked_at: list[int] = []
            with noting(layer, 7, looked_at):
                assert bench.expire() == 0
                assert looked_at == [7]
                release(layer, made.forward_id)
                assert bench.expire() == 0
                assert looked_at == [7]

    def test_a_deleted_one_makes_room_for_another_of_its_name(self, bench: LayerBench) -> None:
        key = ResourceKey("c", "007")
        for _ in range(2):
            forward(bench.layer(key), np.ones((2, 3), np.float32), lease=10)
            bench.registry.delete(key)
            assert bench.expire() == 0
        forward(bench.layer(key), np.ones((2, 3), np.float32), lease=10)
        bench.now += 10
        assert bench.expire() == 1

    def test_others_get_their_turns_while_updates_are_run(self, bench: LayerBench) -> None:
        x = np.ones((2, 3), np.float32)
        for number in range(self.COUNT):
            forward(bench.registry.get(ResourceKey("c", f"{number:03}")), x, is_training=False)

        async def count_turns() -> int:
            running = asyncio.ensure_future(bench.registry.run_updates("c", "update_ops", ()))
            turns = 0
            while not running.done():
                turns += 1
                await asyncio.sleep(0)
            assert running.result() == 0
            return turns

        assert asyncio.run(count_turns()) >= self.COUNT

    def test_a_page_goes_by_scope_and_collection(self, bench: LayerBench) -> None:
        for name in ("1/b", "1/a", "2/a"):
            bench.layer(ResourceKey("c", name), outputs_collections=("tagged",))

        def page(after: str, scope: str, collection: str) -> list[str]:
            found = bench.registry.page("c", after, 2, scope=scope, collection=collection)
            return [key.name for key, _ in found]

        assert page("", "", "tagged") == ["1/a", "1/b"]
        assert page("1/b", "", "tagged") == ["2/a"]
        assert page("1/a", "1/", "tagged") == ["1/b"]
        assert page("", "29", "update_ops") == ["290", "291"]
        assert page("", "29", "tagged") == []


@contextmanager
def noting(layer: BatchNormLayer, number: int, looked_at: list[int]) -> Iterator[None]:
    """Notes that a layer is asked to do something for its forwards."""

    def noted(method: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
        def call(*arguments: Any) -> Awaitable[int]:
            looked_at.append(number)
            return method(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for method in ("expire", "run_updates"):
            patch.setattr(layer, method, noted(getattr(layer, method)))
        yield
