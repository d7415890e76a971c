"""The batch normalization layers made by a client."""

import threading
import weakref

from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.calls.batch_norm.wire import run_collection_updates
from gradserve.calls.exchange import Operation

_DEFAULT_CONTAINER = "default"


class MadeLayers:
    """The layer objects that the program still uses.

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
        """Runs the updates of the layers of a collection; returns the number of forwards whose updates were run now."""
        with self._lock:
            objects = list(self._objects)
        # Listed before the request, because a forward in another thread may end after it.
        pending = [(each, each.pending(container or _DEFAULT_CONTAINER, collection)) for each in objects]
        num_run = yield from run_collection_updates(container, collection)
        for each, forward_ids in pending:
            each.updated(forward_ids)
        return num_run
