"""The batch normalization layers that a client made."""

import threading
import weakref

from gradserve.calls.batch_norm_layer import BatchNormLayerCalls
from gradserve.calls.batch_norm_layer_wire import BatchNormLayerWire, run_collection_updates
from gradserve.calls.exchange import Operation

_DEFAULT_CONTAINER = "default"


class MadeLayers:
    """Knows layer objects while the program uses them, and layers without a scope until they are deleted.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: weakref.WeakSet[BatchNormLayerCalls] = weakref.WeakSet()
        self._private: dict[str, BatchNormLayerWire] = {}

    def add(self, layer: BatchNormLayerCalls) -> None:
        """Adds an object."""
        with self._lock:
            self._objects.add(layer)

    def add_private(self, wire: BatchNormLayerWire) -> None:
        """Adds a layer without a scope."""
        with self._lock:
            self._private[wire.ref.name] = wire

    def deleted(self, wire: BatchNormLayerWire) -> None:
        """Forgets a layer that was deleted."""
        with self._lock:
            self._private.pop(wire.ref.name, None)

    def run_updates(self, container: str, collection: str) -> Operation[int]:
        """Runs the updates of the layers of a collection; returns of how many forwards they were run now."""
        with self._lock:
            objects = list(self._objects)
        # Those of before the request: a forward in another thread may end after it.
        pending = [(each, each.pending(container or _DEFAULT_CONTAINER, collection)) for each in objects]
        num_run = yield from run_collection_updates(container, collection)
        for each, forward_ids in pending:
            each.updated(forward_ids)
        return num_run

    def delete_private(self) -> Operation[None]:
        """Deletes the layers without a scope."""
        with self._lock:
            left = list(self._private.values())
        for wire in left:
            yield from wire.delete()
            self.deleted(wire)
