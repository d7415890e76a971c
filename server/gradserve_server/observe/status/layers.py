"""Layers, as a status shows them."""

from collections.abc import Sequence
from heapq import nsmallest
from typing import Any

from gradserve.server_status import LayerStatus
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.registry import LayerRegistry
from gradserve_server.observe.status.request import StatusRequest

MOST_LAYERS = 1000


def layer_statuses(
    layers: LayerRegistry[Any, BatchNormLayer], request: StatusRequest
) -> tuple[Sequence[LayerStatus], int]:
    """Returns the layers that a request asks for, by container and name, or the first of many; and their number."""
    found = [(key, layer) for key, layer in layers.all_reached(request.user) if request.asks_for(key)]
    first = nsmallest(MOST_LAYERS, found, key=lambda each: each[0])
    described = [LayerStatus(key.container, key.name, len(layer.forwards), layer.num_bytes) for key, layer in first]
    return described, len(found)
