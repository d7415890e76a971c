"""Layers, as a status shows them."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple

from gradserve.server_status import LayerStatus
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.registry import LayerRegistry
from gradserve_server.observe.status.request import StatusRequest
from gradserve_server.resources.registry import ResourceKey

MOST_LAYERS = 1000


class LayerSnapshot(NamedTuple):
    """A layer at one moment.

    Attributes:
        key: Its container and name.
        owner: The id of the client that owns it; empty if it is shared.
        num_forwards: The forwards that it keeps.
        num_bytes: Its memory.
    """

    key: ResourceKey
    owner: str
    num_forwards: int
    num_bytes: int


def layer_snapshots(layers: LayerRegistry[Any, BatchNormLayer]) -> Iterator[LayerSnapshot]:
    """Returns all layers as they are, in no particular order."""
    for key, owner, layer in layers.all_owned():
        yield LayerSnapshot(key, owner, len(layer.forwards), layer.num_bytes)


def layer_statuses(layers: Iterable[LayerSnapshot], request: StatusRequest) -> tuple[Sequence[LayerStatus], int]:
    """Returns the layers that a request asks for, by container and name, or the first of many; and their number."""
    found = [each for each in layers if request.asks_for(each.key, each.owner)]
    first = nsmallest(MOST_LAYERS, found, key=lambda each: each.key)
    described = [LayerStatus(each.key.container, each.key.name, each.num_forwards, each.num_bytes) for each in first]
    return described, len(found)
