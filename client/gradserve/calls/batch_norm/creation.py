"""Creates batch normalization layers, or finds existing ones."""

import threading
import weakref
from dataclasses import dataclass

from gradserve.calls.arguments import IgnoredArguments, arguments_named
from gradserve.calls.batch_norm.config import BatchNormArguments
from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.calls.batch_norm.wire import (
    BatchNormLayerWire,
    Creation,
    create_layer,
    ignored_arguments,
    run_collection_updates,
)
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds, private_name
from gradserve.calls.lease import ClientLease
from gradserve.conversion.arrays import as_dtype
from gradserve.conversion.plain import as_shape, is_text
from gradserve.results import DTypeLike, Shape
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import layer_pb2, tensor_pb2

_DEFAULT_CONTAINER = "default"
_PRIVATE_SCOPE = "BatchNorm"


class LiveLayers:
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


@dataclass(frozen=True)
class LayerPlace:
    """The name, lifetime and inputs of a layer to create or find; see `Client.batch_norm`."""

    container: str
    scope: str | None
    reuse: bool | None
    idle_lease: float | None
    input_shape: Shape | None
    dtype: DTypeLike | None


def make_layer(
    arguments: BatchNormArguments,
    place: LayerPlace,
    ids: RequestIds,
    made: LiveLayers,
    lease: ClientLease,
) -> Operation[BatchNormLayerCalls]:
    """Creates a layer, or finds the one with this scope and equal arguments.

    Args:
        arguments: Its configuration.
        place: Its name, lifetime and inputs.
        ids: The client's request ids, which name a layer without a scope.
        made: The client's layer objects, to which the new one is added.
        lease: The lease of the client, which keeps a layer without a scope.
    """
    for argument, value in {"container": place.container, "scope": "" if place.scope is None else place.scope}.items():
        if not is_text(value):
            raise InvalidArgumentError(f"expected a name as {argument}, got {described(value)}", field=argument)
    is_private = place.scope is None
    lifetime = lease.lifetime(place.idle_lease, is_private=is_private)
    creation = Creation(_reuse(place), ids.name(), *_inputs(place.dtype, place.input_shape), lifetime)
    name = private_name(_PRIVATE_SCOPE, ids) if place.scope is None else place.scope
    creating = create_layer(place.container, name, arguments, creation)
    with arguments_named({"input_dtype": "dtype"}):
        info = yield from lease.create(name, creating) if is_private else creating
    wire = BatchNormLayerWire(info)
    ignored = IgnoredArguments(wire.ref.name)
    ignored.warn(ignored_arguments(info.warnings))
    layer = BatchNormLayerCalls(wire, ids, ignored, is_private=is_private, deleted=lease.deleted)
    made.add(layer)
    return layer


def _reuse(place: LayerPlace) -> layer_pb2.LayerReuse:
    if place.reuse is None:
        return layer_pb2.LAYER_REUSE_UNSPECIFIED
    if not isinstance(place.reuse, bool):
        raise InvalidArgumentError(f"expected reuse None, True or False, got {described(place.reuse)}", field="reuse")
    if place.reuse and place.scope is None:
        raise InvalidArgumentError("reuse=True cannot be used without a name_or_scope", field="reuse")
    return layer_pb2.LAYER_REUSE_REQUIRED if place.reuse else layer_pb2.LAYER_REUSE_FORBIDDEN


def _inputs(dtype: DTypeLike | None, shape: Shape | None) -> tuple[tensor_pb2.DataType, tuple[int, ...]]:
    if (dtype is None) != (shape is None):
        missing, given = ("dtype", "input_shape") if dtype is None else ("input_shape", "dtype")
        raise InvalidArgumentError(
            f"expected dtype and input_shape together, or neither, got only {given}", field=missing
        )
    if dtype is None or shape is None:
        return tensor_pb2.DATA_TYPE_UNSPECIFIED, ()
    return to_data_type(as_dtype(dtype, Argument("dtype"))), as_shape(shape, Argument("input_shape"))
