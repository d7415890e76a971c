"""The registry counts layers and their names, lets go of what they keep, and tells their journals."""

import asyncio
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.layers.batch_norm.registry import Reuse
from gradserve_server.resources.lifetimes import SHARED, Lifetime
from gradserve_server.resources.registry import ResourceKey
from tests.journals import EventJournal
from tests.layers.bench import KEY, LayerBench, config_of, forward

X = np.ones((2, 3), np.float32)
LATE: dict[str, Any] = {"updates_collections": "mine"}


class Noting(EventJournal[Event]):
    """Notes the lifetimes of layers that can be found."""

    def __init__(self) -> None:
        self.lifetimes: list[Lifetime] = []

    async def append(self, event: Event) -> None: ...

    def begin(self, lifetime: Lifetime) -> None:
        self.lifetimes.append(lifetime)


def test_there_are_so_many_at_most() -> None:
    registry = LayerBench(max_layers=1).registry
    registry.create(KEY, config_of(), Reuse.ALLOWED, "")
    with pytest.raises(ResourceExhaustedError, match="too many layers"):
        registry.create(ResourceKey("c", "other"), config_of(), Reuse.ALLOWED, "")
    assert registry.delete(KEY)
    assert registry.count.used == 0


def test_what_cannot_be_built_is_not_found() -> None:
    registry, dtype = LayerBench().registry, np.dtype(np.float32)
    with pytest.raises(InvalidArgumentError):
        asyncio.run(registry.create_built(KEY, config_of(), Reuse.ALLOWED, "", dtype, (-1, -1)))
    assert (registry.count.used, registry.has(KEY)) == (0, False)
    layer, created = asyncio.run(registry.create_built(KEY, config_of(), Reuse.ALLOWED, "", dtype, (-1, 4)))
    assert layer.variables is not None
    assert (layer.variables.num_channels, created) == (4, True)


def test_it_looks_after_those_that_keep_forwards() -> None:
    bench = LayerBench()
    registry, layer = bench.registry, bench.layer(**LATE)
    assert asyncio.run(registry.expire()) == 0
    for forward_id in ("a", "b"):
        forward(layer, X, forward_id=forward_id, keep_for_backward=False)
    for container, collection, count in (("test", "scaling", 0), ("other", "mine", 0), ("test", "mine", 2)):
        assert asyncio.run(registry.run_updates(container, collection, ())) == count
    forward(layer, X, forward_id="c", lease=5.0)
    bench.now = 6.0
    assert asyncio.run(registry.expire()) == 1
    assert asyncio.run(registry.expire()) == 0


def test_names_and_tags_count() -> None:
    bench = LayerBench()
    layer = bench.layer(**LATE)
    used = bench.bookkeeping.used
    assert used == layer.config.text_bytes > 0
    bench.bookkeeping.reserve((1 << 40) - used)
    with pytest.raises(ResourceExhaustedError, match="too many bytes of bookkeeping"):
        bench.layer(ResourceKey("c", "other"), **LATE)
    assert bench.registry.count.used == 1
    bench.registry.delete(KEY)
    assert (bench.bookkeeping.used, bench.registry.count.used) == ((1 << 40) - used, 0)


def test_layers_begin_when_they_can_be_found() -> None:
    noting = Noting()
    registry, lifetime, config = LayerBench(journal=noting).registry, Lifetime(idle_lease=5), config_of()
    key, other = ResourceKey("c", "a"), ResourceKey("c", "b")
    registry.create(key, config, Reuse.ALLOWED, "", lifetime)
    registry.create(key, config, Reuse.ALLOWED, "", lifetime)
    asyncio.run(registry.create_built(other, config, Reuse.ALLOWED, "", np.dtype(np.float32), (2, 3), SHARED))
    assert noting.lifetimes == [lifetime, SHARED]


def test_layers_that_were_there_before_count() -> None:
    noting = Noting()
    bench = LayerBench(journal=noting)
    layer = bench.registry.restore(
        KEY, config_of(), Lifetime(idle_lease=5), incarnation="i", creation_id="", journal=None
    )
    assert bench.registry.get(KEY) is layer
    assert bench.registry.lifetime(KEY) == Lifetime(idle_lease=5)
    assert (bench.registry.count.used, noting.lifetimes) == (1, [])
    forward(layer, X, forward_id="a")
    assert bench.registry.delete(KEY)
    assert (bench.registry.count.used, bench.handles.used) == (0, 0)
