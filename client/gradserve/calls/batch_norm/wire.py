"""Operations on batch normalization layers: the messages they send and receive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradserve.batch_norm_results import (
    BatchNormForward,
    BatchNormGradients,
    BatchNormImplementation,
    BatchNormLayerInfo,
    IgnoredArgument,
    VariableInfo,
)
from gradserve.calls.batch_norm.config import BatchNormArguments, read_arguments
from gradserve.calls.exchange import Operation, Reply, Unary, Whole
from gradserve.calls.tensors.arguments import encode_lease, receive_results
from gradserve.calls.tensors.operations import OpInput, call_with_inputs, placement_of, receive_outputs
from gradserve.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve.v1 import layer_pb2, lease_pb2, tensor_pb2
from gradserve.wire.arrays import Array, DType
from gradserve.wire.messages import decode_duration
from gradserve.wire.tensors import to_dtype

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
        """Takes the layer as it was found or created."""
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
