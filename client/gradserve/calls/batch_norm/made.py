"""The batch normalization layers that a client made."""

import threading
import weakref

from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.calls.batch_norm.wire import run_collection_updates
from gradserve.calls.exchange import Operation

_DEFAULT_CONTAINER = "default"


class MadeLayers:
    """Knows layer objects while the program uses them.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: weakref.WeakSet[BatchNormLayerCalls] = weakref.WeakSet()

    def add(self, layer: BatchNormLayerCalls) -> None:
        """Adds an object."""
        with self._lock:
            self._objects.add(layer)

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
