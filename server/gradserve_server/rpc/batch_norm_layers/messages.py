"""Conversion of messages about layers to domain values and back."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradserve.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve.v1 import layer_pb2, tensor_pb2
from gradserve.wire.tensors import Contents, WithContents, to_dtype
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.batch_norm.calls import ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.config import IgnoredArgument
from gradserve_server.layers.batch_norm.given import GivenVariable
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.variables import unknown_variables
from gradserve_server.layers.registry import Reuse
from gradserve_server.limits import MAX_FORWARDS, MAX_NAME_BYTES, check_count, check_length
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.batch_norm_layers.configs import encode_config
from gradserve_server.rpc.boundary.fields import decode_duration, encode_idle_lease
from gradserve_server.rpc.tensors.messages import (
    decode_reference,
    encode_delivered,
    encode_spec,
)
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.delivery import Delivered
from gradserve_server.tensors.payload import Payload

MAX_VARIABLES = 1 << 10
"""The limit of variables in one request."""
_TYPICAL_PARTS = 4
_TYPICAL_VARIABLES = 4
_REUSES = {
    layer_pb2.LAYER_REUSE_UNSPECIFIED: Reuse.ALLOWED,
    layer_pb2.LAYER_REUSE_REQUIRED: Reuse.REQUIRED,
    layer_pb2.LAYER_REUSE_FORBIDDEN: Reuse.FORBIDDEN,
}
_IMPLEMENTATION_CODES = {
    Implementation.FUSED: batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_FUSED,
    Implementation.CORE_FUSED: batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_CORE_FUSED,
    Implementation.CORE: batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_CORE,
    Implementation.LEGACY: batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_LEGACY,
}


def decode_key(ref: batch_norm_pb2.BatchNormLayerRef, user: Identity = ANONYMOUS) -> ResourceKey:
    """Returns the key of a layer that somebody names."""
    return ResourceKey(ref.container or DEFAULT_CONTAINER, ref.name, user)


def decode_reuse(reuse: layer_pb2.LayerReuse) -> Reuse:
    """Reads whether a layer may, must or must not exist.

    Raises:
        InvalidArgumentError: The value is unknown.
    """
    if reuse not in _REUSES:
        raise InvalidArgumentError(f"expected a known reuse, got {reuse}", field="reuse")
    return _REUSES[reuse]


def num_parts(layer: BatchNormLayer) -> int:
    """Returns the number of parts that the message of a layer has, about: each variable has its tags."""
    return _TYPICAL_PARTS + _TYPICAL_VARIABLES * len(layer.collections)


def encode_info(
    key: ResourceKey, layer: BatchNormLayer, lifetime: Lifetime, collection: str = ""
) -> batch_norm_pb2.BatchNormLayerInfo:
    """Describes a layer as it is now, with all its variables, or with those that have the tag `collection`."""
    variables = {} if layer.variables is None else layer.variables.by_name()
    return batch_norm_pb2.BatchNormLayerInfo(
        layer=batch_norm_pb2.BatchNormLayerRef(container=key.container, name=key.name, incarnation=layer.incarnation),
        config=encode_config(layer.config),
        variables=[
            layer_pb2.VariableInfo(
                name=name,
                spec=encode_spec(array),
                trainable=layer.config.trainable and layer.config.has_variable(name),
                collections=layer.config.collections_of(name),
            )
            for name, array in variables.items()
            if not collection or collection in layer.config.collections_of(name)
        ],
        num_forwards=len(layer.forwards),
        num_updates=layer.num_updates,
        num_bytes=layer.num_bytes,
        warnings=encode_ignored([*layer.config.warnings(), *unknown_variables(layer.config)]),
        is_private=bool(lifetime.owner),
        idle_lease=encode_idle_lease(lifetime),
    )


def encode_ignored(ignored: Sequence[IgnoredArgument]) -> list[layer_pb2.IgnoredArgument]:
    """Returns the messages of arguments that have no effect."""
    return [layer_pb2.IgnoredArgument(argument=each.argument, reason=each.reason) for each in ignored]


def decode_input_dtype(data_type: tensor_pb2.DataType) -> np.dtype[Any]:
    """Reads the dtype of the inputs that a layer is created for.

    Raises:
        InvalidArgumentError: The value is not the dtype of an array.
    """
    try:
        return to_dtype(data_type)
    except ValueError as error:
        raise InvalidArgumentError(str(error), field="input_dtype") from None


def decode_collection(ref: layer_pb2.LayerCollectionRef) -> tuple[str, str]:
    """Returns the container and the name of a collection.

    Raises:
        InvalidArgumentError: The name is empty.
    """
    if not ref.name:
        raise InvalidArgumentError("expected the name of a collection, got an empty one", field="collection.name")
    return ref.container or DEFAULT_CONTAINER, ref.name


def decode_variables(
    variables: Sequence[layer_pb2.NamedTensor], payload: Payload, user: Identity = ANONYMOUS
) -> list[GivenVariable]:
    """Reads values for variables.

    Raises:
        InvalidArgumentError: There are too many, or a name is too long.
    """
    check_count(variables, MAX_VARIABLES, "variables", "variables")
    for index, each in enumerate(variables):
        check_length(each.name, MAX_NAME_BYTES, f"variables[{index}].name")
    return [GivenVariable(each.name, decode_reference(each.tensor, payload, user)) for each in variables]


def decode_forward(
    request: messages_pb2.BatchNormForwardRequest,
    lease_seconds: Callable[[float | None], float],
    user: Identity = ANONYMOUS,
) -> ForwardCall:
    """Reads the options of a forward; `lease_seconds` returns the lease to grant for the one requested.

    Raises:
        InvalidArgumentError: It releases too many forwards, or the lease is not positive.
    """
    check_count(request.released_forward_ids, MAX_FORWARDS, "forwards", "released_forward_ids")
    return ForwardCall(
        is_training=request.is_training if request.HasField("is_training") else True,
        forward_id=user.own(request.forward_id or _new_id(user)),
        keep_for_backward=request.keep_for_backward if request.HasField("keep_for_backward") else None,
        lease=lease_seconds(decode_duration(request, "lease")),
        released=[user.own(each) for each in request.released_forward_ids],
    )


def _new_id(user: Identity) -> str:
    """Returns an id for a forward that has none, which belongs to its caller; empty where all belongs to everybody."""
    return secrets.token_hex(16) if user.name else ""


def encode_forward(result: ForwardResult, delivered: Delivered) -> WithContents:
    """Returns the response to a forward, with its delivered outputs."""
    contents = Contents()
    (outputs,) = encode_delivered([delivered], contents)
    drawn_scale, drawn_bias = (None, None) if result.drawn is None else map(contents.tensor, result.drawn)
    response = messages_pb2.BatchNormForwardResponse(
        outputs=outputs,
        forward_id=result.forward_id,
        has_pending_updates=result.has_pending_updates,
        implementation=_IMPLEMENTATION_CODES[result.implementation],
        regularization_losses=result.regularization_losses,
        warnings=encode_ignored(result.ignored),
        drawn_adjustment_scale=drawn_scale,
        drawn_adjustment_bias=drawn_bias,
    )
    return WithContents(response, contents)


def encode_gradients(delivered: Mapping[str, Delivered]) -> WithContents:
    """Returns the response to a backward, with its delivered gradients."""
    contents = Contents()
    tensors = dict(zip(delivered, encode_delivered(delivered.values(), contents), strict=True))
    return WithContents(messages_pb2.BatchNormBackwardResponse(**tensors), contents)


def encode_variables(delivered: Mapping[str, Delivered]) -> WithContents:
    """Returns the response with the delivered variables, by name."""
    contents = Contents()
    tensors = encode_delivered(delivered.values(), contents)
    variables = [layer_pb2.NamedTensor(name=name, tensor=each) for name, each in zip(delivered, tensors, strict=True)]
    return WithContents(messages_pb2.GetBatchNormVariablesResponse(variables=variables), contents)
