"""Layers, as a status shows them."""

from collections.abc import Iterable
from heapq import nsmallest
from typing import Any

from gradserve.server_status import LayerStatus
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.registry import LayerRegistry
from gradserve_server.security.identity import Identity


def layer_statuses(
    layers: LayerRegistry[Any, BatchNormLayer], user: Identity, container: str, count: int
) -> Iterable[LayerStatus]:
    """Returns the first layers that somebody may see, by container and name.

    Args:
        layers: All layers.
        user: Who asks.
        container: The only container; empty for all in which the user has a role.
        count: The most layers.
    """
    seen = (
        LayerStatus(key.container, key.name, len(layer.forwards), layer.num_bytes)
        for key, layer in layers.all_reached(user)
        if container in ("", key.container) and user.role_in(key.container) is not None
    )
    return nsmallest(count, seen, key=lambda each: (each.container, each.name))
