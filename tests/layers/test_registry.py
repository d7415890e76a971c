"""The registry looks after layers of any kind."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from gradserve_server.layers.registry import LayerRegistry, Reuse
from gradserve_server.resources.lifetimes import Lifetime, Lifetimes
from gradserve_server.resources.quotas import Quota
from gradserve_server.resources.registry import ResourceKey

KEY = ResourceKey("c", "name")


class Scaling:
    """A layer of a kind of its own: its configuration is a factor."""

    def __init__(self, factor: int, creation_id: str, on_presence: Callable[[bool], object]) -> None:
        self.factor = factor
        self.creation_id = creation_id
        self.incarnation = f"incarnation of {creation_id}"
        self.collections = ("scaling", "mine")
        self.bookkeeping_bytes = 300 if factor == 1000 else 100
        self.updates_collections = ("mine",)
        self.waiting = 0
        self.num_channels = 0
        self.is_closed = False
        self.begun: list[Lifetime] = []
        self._on_presence = on_presence

    def forward(self) -> None:
        self.waiting += 1
        self._on_presence(True)

    async def build(self, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        if shape[-1] < 1:
            raise InvalidArgumentError("expected channels")
        self.num_channels = shape[-1]

    async def run_updates(self, forward_ids: Sequence[str]) -> int:
        return self._let_go()

    async def expire(self) -> int:
        return self._let_go()

    def begin(self, lifetime: Lifetime) -> None:
        self.begun.append(lifetime)

    def close(self) -> None:
        self.is_closed = True

    def _let_go(self) -> int:
        count, self.waiting = self.waiting, 0
        self._on_presence(False)
        return count


class ScalingKind:
    first_variable = "factor"

    def check(self, config: int) -> None:
        if config < 0:
            raise InvalidArgumentError(f"expected a factor of at least 0, got {config}")

    def differences(self, layer: Scaling, config: int) -> str:
        return "" if layer.factor == config else f"factor is {layer.factor}, not {config}"

    def make(self, key: ResourceKey, config: int, creation_id: str, on_presence: Callable[[bool], object]) -> Scaling:
        return Scaling(config, creation_id, on_presence)

    async def settle(self) -> None:
        pass


@pytest.fixture
def registry() -> LayerRegistry[int, Scaling]:
    return LayerRegistry(ScalingKind(), Quota(2, "layers"), Lifetimes(lambda: 0.0, 60.0), Quota(250, "bytes"))


def test_it_creates_and_finds(registry: LayerRegistry[int, Scaling]) -> None:
    layer, created = registry.create(KEY, 3, Reuse.ALLOWED, "id")
    assert (layer.factor, created) == (3, True)
    assert registry.create(KEY, 3, Reuse.REQUIRED, "") == (layer, False)
    assert registry.create(KEY, 3, Reuse.FORBIDDEN, "id") == (layer, False)
    assert registry.page("c", "", 5, scope="n", collection="scaling") == [(KEY, layer)]
    assert registry.page("c", "", 5, scope="n", collection="other") == []
    assert registry.delete(KEY)
    assert layer.is_closed
    assert registry.count.used == 0


def test_it_refuses_in_the_words_of_the_kind(registry: LayerRegistry[int, Scaling]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a factor of at least 0, got -1"):
        registry.create(KEY, -1, Reuse.ALLOWED, "")
    with pytest.raises(NotFoundError, match="Variable name/factor does not exist"):
        registry.create(KEY, 1, Reuse.REQUIRED, "")
    registry.create(KEY, 1, Reuse.ALLOWED, "")
    with pytest.raises(AlreadyExistsError, match="Variable name/factor already exists"):
        registry.create(KEY, 1, Reuse.FORBIDDEN, "")
    with pytest.raises(AlreadyExistsError, match="with another configuration: factor is 1, not 2"):
        registry.create(KEY, 2, Reuse.ALLOWED, "")
    registry.create(ResourceKey("c", "other"), 1, Reuse.ALLOWED, "")
    with pytest.raises(ResourceExhaustedError, match="too many layers"):
        registry.create(ResourceKey("c", "third"), 1, Reuse.ALLOWED, "")


async def test_what_cannot_be_built_is_not_found(registry: LayerRegistry[int, Scaling]) -> None:
    dtype = np.dtype(np.float32)
    with pytest.raises(InvalidArgumentError, match="expected channels"):
        await registry.create_built(KEY, 1, Reuse.ALLOWED, "", dtype, (-1, 0))
    assert registry.count.used == 0
    layer, created = await registry.create_built(KEY, 1, Reuse.ALLOWED, "", dtype, (-1, 4))
    assert (layer.num_channels, created) == (4, True)


async def test_it_looks_after_those_that_keep_forwards(registry: LayerRegistry[int, Scaling]) -> None:
    layer, _ = registry.create(KEY, 1, Reuse.ALLOWED, "")
    assert await registry.expire() == 0
    for _ in range(2):
        layer.forward()
    assert await registry.run_updates("c", "scaling", ()) == 0
    assert await registry.run_updates("other", "mine", ()) == 0
    assert await registry.run_updates("c", "mine", ()) == 2
    layer.forward()
    assert await registry.expire() == 1
    assert await registry.expire() == 0


def test_names_and_tags_count() -> None:
    bookkeeping = Quota(250, "bytes of bookkeeping")
    registry: LayerRegistry[int, Scaling] = LayerRegistry(
        ScalingKind(), Quota(9, "layers"), Lifetimes(lambda: 0.0, 60.0), bookkeeping
    )
    keys = [ResourceKey("default", name) for name in "ab"]
    for key in keys:
        registry.create(key, 2, Reuse.ALLOWED, "")
    for factor in (2, 1000):
        with pytest.raises(ResourceExhaustedError, match="too many bytes of bookkeeping"):
            registry.create(ResourceKey("default", "c"), factor, Reuse.ALLOWED, "")
        assert (bookkeeping.used, registry.count.used) == (200, 2)
    for key in keys:
        registry.delete(key)
    assert (bookkeeping.used, registry.count.used) == (0, 0)


async def test_layers_begin_when_they_can_be_found(registry: LayerRegistry[int, Scaling]) -> None:
    lifetime = Lifetime(idle_lease=5)
    first, _ = registry.create(ResourceKey("c", "a"), 2, Reuse.ALLOWED, "", lifetime)
    registry.create(ResourceKey("c", "a"), 2, Reuse.ALLOWED, "", lifetime)
    second, _ = await registry.create_built(
        ResourceKey("c", "b"), 2, Reuse.ALLOWED, "", np.dtype(np.float32), (2, 3), lifetime
    )
    assert [first.begun, second.begun] == [[lifetime], [lifetime]]


def test_layers_that_were_there_before_count(registry: LayerRegistry[int, Scaling]) -> None:
    key = ResourceKey("c", "a")
    layer = registry.restore(key, Lifetime(idle_lease=5), lambda on_presence: Scaling(2, "first", on_presence))
    assert registry.get(key) is layer
    assert registry.lifetime(key) == Lifetime(idle_lease=5)
    assert (registry.count.used, layer.begun) == (1, [])
    layer.forward()
    assert registry.delete(key)
    assert (registry.count.used, layer.is_closed) == (0, True)
