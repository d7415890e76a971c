"""Operations on batch normalization layers: the messages they send and receive."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gradserve.batch_norm import (
    BatchNormForward,
    BatchNormGradients,
    BatchNormImplementation,
    BatchNormLayerInfo,
    IgnoredArgument,
    VariableInfo,
)
from gradserve.calls.batch_norm.config import BatchNormArguments, read_arguments
from gradserve.calls.exchange import Operation, Reply, Unary, Whole
from gradserve.calls.tensors import (
    OpInput,
    call_with_inputs,
    encode_lease,
    placement_of,
    receive_outputs,
    receive_results,
)
from gradserve_protocol.arrays import Array, DType
from gradserve_protocol.messages import decode_duration
from gradserve_protocol.tensors import to_dtype
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, lease_pb2, tensor_pb2

MAX_NAMED = 1 << 14
"""The most forwards that one request names. The server takes four times as many; this many names and inline tensors fit
into a message of gRPC's default size."""
MAX_REMEMBERED = 1 << 16
"""The most forwards of each kind that a layer object remembers, so that a program that never uses or releases them does
not fill its memory with names."""
ValueT = TypeVar("ValueT")
Inputs = Mapping[str, OpInput]
_SERVICE = "BatchNormLayerService"
_IMPLEMENTATIONS = {
    batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_FUSED: BatchNormImplementation.FUSED,
    batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_CORE_FUSED: BatchNormImplementation.CORE_FUSED,
    batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_CORE: BatchNormImplementation.CORE,
    batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_LEGACY: BatchNormImplementation.LEGACY,
}
_GRADIENTS = {
    "inputs_gradient": "inputs",
    "beta_gradient": "beta",
    "gamma_gradient": "gamma",
    "batch_weights_gradient": "batch_weights",
    "adjustment_scale_gradient": "adjustment_scale",
    "adjustment_bias_gradient": "adjustment_bias",
}
_REGULARIZATION_GRADIENTS = {"beta_regularization_gradient": "beta", "gamma_regularization_gradient": "gamma"}


@dataclass(frozen=True)
class UnusedForward:
    """A forward whose gradients can be computed but have not been.

    Attributes:
        forward_id: Its name on the server.
        dtype: The dtype of its outputs.
        replaceable: Whether the next forward of this kind takes its place, since only the layer object knows its name.
    """

    forward_id: str
    dtype: DType
    replaceable: bool


class Forwards:
    """The forwards of one layer object, the newest of each kind. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: OrderedDict[str, UnusedForward] = OrderedDict()
        self._replaceable: OrderedDict[str, None] = OrderedDict()
        self._pending: OrderedDict[str, None] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()

    def useless(self, *, replacing: bool) -> list[str]:
        """Returns forwards that the server may release with the next one, at most as many as one request names.

        They are remembered until `let_go` confirms the release.

        Args:
            replacing: Whether the next forward takes the place of replaceable ones.
        """
        with self._lock:
            replaced = self._replaceable if replacing else ()
            return list(dict.fromkeys((*replaced, *self._lost)))[:MAX_NAMED]

    def let_go(self, forward_ids: Iterable[str]) -> None:
        """Forgets forwards whose gradients can no longer be computed, but not those forwards' updates."""
        with self._lock:
            for forward_id in forward_ids:
                self._unused.pop(forward_id, None)
                self._replaceable.pop(forward_id, None)
                self._lost.pop(forward_id, None)

    def add_unused(self, forward: UnusedForward) -> None:
        """Remembers a forward whose gradients can be computed, as the newest one."""
        with self._lock:
            _append(self._unused, forward.forward_id, forward)
            if forward.replaceable:
                _append(self._replaceable, forward.forward_id, None)

    def add_pending(self, forward_id: str) -> None:
        """Remembers a forward with pending updates."""
        with self._lock:
            _append(self._pending, forward_id, None)

    def add_lost(self, forward_id: str) -> None:
        """Remembers a forward whose call failed: the server may have it, but the caller never learned its name."""
        with self._lock:
            _append(self._lost, forward_id, None)

    def newest_unused(self) -> UnusedForward | None:
        """Returns the newest forward whose gradients can be computed."""
        with self._lock:
            return next(reversed(self._unused.values()), None)

    def pending(self) -> list[str]:
        """Returns the forwards with pending updates, oldest first."""
        with self._lock:
            return list(self._pending)

    def outstanding(self) -> list[str]:
        """Returns the forwards for whose gradients the server keeps data, and the lost ones."""
        with self._lock:
            return list(dict.fromkeys((*self._unused, *self._lost)))

    def updated(self, forward_ids: Iterable[str]) -> None:
        """Forgets the pending updates of forwards."""
        with self._lock:
            for forward_id in forward_ids:
                self._pending.pop(forward_id, None)

    def forget(self, forward_ids: Iterable[str]) -> None:
        """Forgets forwards altogether."""
        forgotten = list(forward_ids)
        self.let_go(forgotten)
        self.updated(forgotten)

    def forget_all(self) -> None:
        """Forgets all forwards."""
        with self._lock:
            for kind in (self._unused, self._replaceable, self._pending, self._lost):
                kind.clear()


def in_requests(forward_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Splits forwards into batches of as many as one request names, in their order."""
    for start in range(0, len(forward_ids), MAX_NAMED):
        yield forward_ids[start : start + MAX_NAMED]


def _append(kind: OrderedDict[str, ValueT], forward_id: str, value: ValueT) -> None:
    """Puts a forward last, unless it is there already, and drops the oldest if there are too many."""
    kind[forward_id] = value
    if len(kind) > MAX_REMEMBERED:
        kind.popitem(last=False)


@dataclass(frozen=True)
class Creation:
    """The options of creating a layer; see CreateBatchNormLayerRequest in the protos."""

    reuse: layer_pb2.LayerReuse
    creation_id: str
    input_dtype: tensor_pb2.DataType
    input_shape: tuple[int, ...]
    lifetime: lease_pb2.Lifetime


@dataclass(frozen=True)
class ForwardOptions:
    """The options of a forward; see BatchNormForwardRequest in the protos."""

    forward_id: str
    is_training: bool
    keep_for_backward: bool | None
    lease: float | None
    released: tuple[str, ...]


class BatchNormLayerWire:
    """The operations on one layer."""

    def __init__(self, info: batch_norm_pb2.BatchNormLayerInfo) -> None:
        self.ref = info.layer
        self.updates_collections = frozenset(info.config.updates_collections)
        self._dtypes = _dtypes(info)

    def describe(self, collection: str) -> Operation[BatchNormLayerInfo]:
        """Describes the layer, with its variables in a collection, or all for an empty name."""
        return _info((yield from self._describe(collection)))

    def delete(self) -> Operation[bool]:
        """Deletes the layer."""
        return delete_layer(self.ref)

    def forward(self, inputs: Inputs, options: ForwardOptions, *, keep: bool) -> Operation[Reply]:
        """Computes a forward; the caller receives its tensors."""
        lease = None if options.lease is None else encode_lease(options.lease)
        fields: dict[str, Any] = {
            "layer": self.ref,
            "forward_id": options.forward_id,
            "is_training": options.is_training,
            "keep_for_backward": options.keep_for_backward,
            "lease": lease,
            "released_forward_ids": options.released,
            "placement": placement_of(keep=keep, lease=options.lease),
        }
        return call_with_inputs(
            _SERVICE,
            "BatchNormForward",
            inputs,
            lambda tensors: messages_pb2.BatchNormForwardRequest(**tensors, **fields),
            device="auto",
        )

    def backward(
        self, forward_id: str, dy: OpInput, *, retain: bool, keep: bool, lease: float | None
    ) -> Operation[Reply]:
        """Computes gradients; the caller receives them."""
        fields: dict[str, Any] = {
            "layer": self.ref,
            "forward_id": forward_id,
            "retain_forward": retain,
            "placement": placement_of(keep=keep, lease=lease),
        }
        inputs = {"outputs_gradient": dy}
        return call_with_inputs(
            _SERVICE,
            "BatchNormBackward",
            inputs,
            lambda tensors: messages_pb2.BatchNormBackwardRequest(**tensors, **fields),
            device="auto",
        )

    def release(self, forward_ids: Sequence[str], *, keep_updates: bool) -> Operation[int]:
        """Releases forwards, or only what their gradients need; returns the number that existed."""
        request = messages_pb2.ReleaseBatchNormForwardsRequest(
            layer=self.ref, forward_ids=forward_ids, keep_updates=keep_updates
        )
        reply: messages_pb2.ReleaseBatchNormForwardsResponse = yield Unary(
            _SERVICE, "ReleaseBatchNormForwards", request
        )
        return reply.num_released

    def run_updates(self, forward_ids: Sequence[str]) -> Operation[int]:
        """Runs the updates of at least one forward; returns the number of forwards whose updates were run now."""
        request = messages_pb2.RunBatchNormUpdatesRequest(layer=self.ref, forward_ids=forward_ids)
        reply: messages_pb2.RunBatchNormUpdatesResponse = yield Unary(_SERVICE, "RunBatchNormUpdates", request)
        return reply.num_run

    def get_variables(self, names: Sequence[str]) -> Operation[dict[str, Array]]:
        """Reads variables."""
        request = messages_pb2.GetBatchNormVariablesRequest(
            layer=self.ref, names=names, placement=placement_of(keep=False)
        )
        reply: Reply = yield Whole(Unary(_SERVICE, "GetBatchNormVariables", request))
        variables = reply.message.variables
        arrays = yield from receive_results(reply, [each.tensor for each in variables])
        return {each.name: array for each, array in zip(variables, arrays, strict=True)}

    def set_variables(self, values: Inputs) -> Operation[None]:
        """Sets variables."""

        def request(tensors: dict[str, tensor_pb2.Tensor]) -> messages_pb2.SetBatchNormVariablesRequest:
            named = [layer_pb2.NamedTensor(name=name, tensor=tensor) for name, tensor in tensors.items()]
            return messages_pb2.SetBatchNormVariablesRequest(layer=self.ref, variables=named)

        yield from call_with_inputs(_SERVICE, "SetBatchNormVariables", values, request)

    def dtypes(self, names: Sequence[str]) -> Operation[Mapping[str, DType]]:
        """Returns the dtypes of variables, including those of these names that exist."""
        if not set(names) <= self._dtypes.keys():
            # A layer created without variables gets them with the first forward of any client.
            self._dtypes = _dtypes((yield from self._describe()))
        return self._dtypes

    def _describe(self, collection: str = "") -> Operation[batch_norm_pb2.BatchNormLayerInfo]:
        request = messages_pb2.DescribeBatchNormLayerRequest(layer=self.ref, collection=collection)
        reply: messages_pb2.DescribeBatchNormLayerResponse = yield Unary(_SERVICE, "DescribeBatchNormLayer", request)
        return reply.info


def create_layer(
    container: str, name: str, arguments: BatchNormArguments, creation: Creation
) -> Operation[batch_norm_pb2.BatchNormLayerInfo]:
    """Creates a layer, or finds the one with this name and an equal configuration."""
    ref = batch_norm_pb2.BatchNormLayerRef(container=container, name=name)

    def request(tensors: dict[str, tensor_pb2.Tensor]) -> messages_pb2.CreateBatchNormLayerRequest:
        return messages_pb2.CreateBatchNormLayerRequest(layer=ref, config=arguments.message(tensors), **vars(creation))

    reply = yield from call_with_inputs(_SERVICE, "CreateBatchNormLayer", arguments.initial_tensors(), request)
    info: batch_norm_pb2.BatchNormLayerInfo = reply.message.info
    return info


def delete_layer(ref: batch_norm_pb2.BatchNormLayerRef) -> Operation[bool]:
    """Deletes a layer; returns whether it existed."""
    request = messages_pb2.DeleteBatchNormLayerRequest(layer=ref)
    reply: messages_pb2.DeleteBatchNormLayerResponse = yield Unary(_SERVICE, "DeleteBatchNormLayer", request)
    return reply.deleted


def list_layers(container: str, scope: str, collection: str) -> Operation[list[BatchNormLayerInfo]]:
    """Lists layers of a container."""
    found: list[BatchNormLayerInfo] = []
    page_token = ""
    while True:
        request = messages_pb2.ListBatchNormLayersRequest(
            container=container, scope=scope, collection=collection, page_token=page_token
        )
        reply: messages_pb2.ListBatchNormLayersResponse = yield Unary(_SERVICE, "ListBatchNormLayers", request)
        found += [_info(info) for info in reply.layers]
        if not reply.next_page_token:
            return found
        page_token = reply.next_page_token


def run_collection_updates(container: str, collection: str) -> Operation[int]:
    """Runs the updates of the layers with this name among their updates_collections."""
    target = layer_pb2.LayerCollectionRef(container=container, name=collection)
    request = messages_pb2.RunBatchNormUpdatesRequest(collection=target)
    reply: messages_pb2.RunBatchNormUpdatesResponse = yield Unary(_SERVICE, "RunBatchNormUpdates", request)
    return reply.num_run


def receive_forward(reply: Reply, *, keep: bool) -> Operation[BatchNormForward[Any]]:
    """Receives the tensors of a forward."""
    message: messages_pb2.BatchNormForwardResponse = reply.message
    (outputs,) = yield from receive_outputs(reply, [message.outputs], keep=keep)
    drawn = None
    if message.HasField("drawn_adjustment_scale"):
        # Inline even if the outputs stay on the server.
        sent = [message.drawn_adjustment_scale, message.drawn_adjustment_bias]
        scale, bias = yield from receive_results(reply, sent)
        drawn = (scale, bias)
    return BatchNormForward(
        outputs=outputs,
        forward_id=message.forward_id or None,
        has_pending_updates=message.has_pending_updates,
        implementation=_IMPLEMENTATIONS[message.implementation],
        regularization_losses=dict(message.regularization_losses),
        drawn_adjustment=drawn,
        warnings=ignored_arguments(message.warnings),
    )


def receive_gradients(reply: Reply, *, keep: bool) -> Operation[BatchNormGradients[Any]]:
    """Receives the tensors of gradients."""
    message: messages_pb2.BatchNormBackwardResponse = reply.message
    present = [part.name for part, _ in message.ListFields()]
    received = yield from receive_outputs(reply, [getattr(message, name) for name in present], keep=keep)
    tensors = dict(zip(present, received, strict=True))
    return BatchNormGradients(
        **{ours: tensors.get(theirs) for theirs, ours in _GRADIENTS.items()},
        regularization={
            ours: tensors[theirs] for theirs, ours in _REGULARIZATION_GRADIENTS.items() if theirs in tensors
        },
    )


def ignored_arguments(warnings: Sequence[layer_pb2.IgnoredArgument]) -> tuple[IgnoredArgument, ...]:
    """Returns the server's warnings of arguments without effect."""
    return tuple(IgnoredArgument(each.argument, each.reason) for each in warnings)


def _info(info: batch_norm_pb2.BatchNormLayerInfo) -> BatchNormLayerInfo:
    return BatchNormLayerInfo(
        container=info.layer.container,
        name=info.layer.name,
        arguments=read_arguments(info.config),
        variables=tuple(
            VariableInfo(
                each.name,
                to_dtype(each.spec.dtype),
                tuple(each.spec.shape),
                each.trainable,
                tuple(each.collections),
            )
            for each in info.variables
        ),
        num_forwards=info.num_forwards,
        num_updates=info.num_updates,
        num_bytes=info.num_bytes,
        warnings=ignored_arguments(info.warnings),
        is_private=info.is_private,
        idle_lease=decode_duration(info, "idle_lease"),
    )


def _dtypes(info: batch_norm_pb2.BatchNormLayerInfo) -> dict[str, DType]:
    return {each.name: to_dtype(each.spec.dtype) for each in info.variables}
