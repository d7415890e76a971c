"""Conversion of messages about layers, and of their configurations, to domain values and back."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradserve_protocol.tensors import Contents, WithContents, to_data_type, to_dtype
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, tensor_pb2
from gradserve_server.errors import InvalidArgumentError, request_fields
from gradserve_server.layers.batch_norm.config import UPDATE_OPS, BatchNormConfig, IgnoredArgument, RandomAdjustment
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.registry import Reuse
from gradserve_server.layers.batch_norm.spec import Implementation
from gradserve_server.layers.batch_norm.variables import unknown_variables
from gradserve_server.layers.variables import Initializer, NamedInitializer, Regularizer, TensorInitializer
from gradserve_server.limits import MAX_FORWARDS, MAX_NAME_BYTES, check_count, check_length
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.boundary.fields import (
    decode_durability,
    decode_duration,
    encode_durability,
    encode_idle_lease,
)
from gradserve_server.rpc.boundary.messages import Entries, Piece
from gradserve_server.rpc.tensors.messages import (
    OutgoingTensors,
    decode_tensors,
    encode_spec,
)
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.incoming import IncomingTensors, TensorOpener
from gradserve_server.tensors.payload import Payload

MAX_ENTRIES = 1 << 10
"""The limit of entries in each field of collections, initializers or regularizers."""


MAX_VARIABLES = 1 << 10
"""The limit of variables in one request."""
_DEFAULTS = BatchNormConfig()
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
    """Returns the key of the layer that a caller names."""
    return ResourceKey(ref.container or DEFAULT_CONTAINER, ref.name, user)


def decode_reuse(reuse: layer_pb2.LayerReuse) -> Reuse:
    """Reads whether a layer may, must or must not exist.

    Raises:
        InvalidArgumentError: The value is unknown.
    """
    if reuse not in _REUSES:
        raise InvalidArgumentError(f"expected a known reuse, got {reuse}", field="reuse")
    return _REUSES[reuse]


async def decode_config(
    config: batch_norm_pb2.BatchNormConfig, opener: TensorOpener, payload: Payload, user: Identity = ANONYMOUS
) -> BatchNormConfig:
    """Reads a configuration and the tensors in it.

    Raises:
        InvalidArgumentError: A part of it is malformed.
        NotFoundError: A handle does not exist.
    """
    check_count(config.updates_collections, MAX_ENTRIES, "entries", "config.updates_collections")
    check_count(config.outputs_collections, MAX_ENTRIES, "entries", "config.outputs_collections")
    check_count(config.param_initializers, MAX_ENTRIES, "entries", "config.param_initializers")
    check_count(config.param_regularizers, MAX_ENTRIES, "entries", "config.param_regularizers")
    check_count(config.variables_collections, MAX_ENTRIES, "entries", "config.variables_collections")
    check_count(config.renorm_clipping, MAX_ENTRIES, "entries", "config.renorm_clipping")
    check_length(config.activation_fn, MAX_NAME_BYTES, "config.activation_fn")
    check_length(config.data_format, MAX_NAME_BYTES, "config.data_format")
    for argument in ("param_initializers", "param_regularizers", "variables_collections", "renorm_clipping"):
        for name in getattr(config, argument):
            check_length(name, MAX_NAME_BYTES, f"config.{argument}")
    durability = decode_durability(config.durability, "config.durability")
    with request_fields({"activation_fn": "config.activation_fn"}):
        initializers = await open_initializers(
            opener, *_decode_initializers(sorted(config.param_initializers.items()), payload, user)
        )
    collections = tuple(config.updates_collections)
    return BatchNormConfig(
        decay=config.decay if config.HasField("decay") else _DEFAULTS.decay,
        center=config.center if config.HasField("center") else _DEFAULTS.center,
        scale=config.scale,
        epsilon=config.epsilon if config.HasField("epsilon") else _DEFAULTS.epsilon,
        activation_fn=config.activation_fn,
        param_initializers=initializers,
        param_regularizers={
            name: Regularizer(regularizer.name, _given(regularizer, ("l1", "l2")))
            for name, regularizer in sorted(config.param_regularizers.items())
        },
        in_place_updates=config.in_place_updates,
        updates_collections=collections or (() if config.in_place_updates else (UPDATE_OPS,)),
        variables_collections={
            name: tuple(tags.names) for name, tags in sorted(config.variables_collections.items()) if tags.names
        },
        outputs_collections=tuple(config.outputs_collections),
        trainable=config.trainable if config.HasField("trainable") else _DEFAULTS.trainable,
        fused=config.fused if config.HasField("fused") else _DEFAULTS.fused,
        data_format=config.data_format or _DEFAULTS.data_format,
        zero_debias_moving_mean=config.zero_debias_moving_mean,
        renorm=config.renorm,
        renorm_clipping=dict(sorted(config.renorm_clipping.items())),
        renorm_decay=config.renorm_decay if config.HasField("renorm_decay") else _DEFAULTS.renorm_decay,
        adjustment=_decode_adjustment(config),
        renorm_zero_debias=config.renorm_zero_debias,
        durability=durability,
    )


def encode_config(config: BatchNormConfig) -> batch_norm_pb2.BatchNormConfig:
    """Returns the message of a configuration, with every field set; tensors have only dtype and shape."""
    adjustment = None
    if config.adjustment is not None:
        (scale_min, scale_max), (bias_min, bias_max) = config.adjustment.scale, config.adjustment.bias
        adjustment = batch_norm_pb2.RandomAdjustment(
            scale_min=scale_min,
            scale_max=scale_max,
            bias_min=bias_min,
            bias_max=bias_max,
            seed=config.adjustment.seed,
        )
    message = batch_norm_pb2.BatchNormConfig(
        decay=config.decay,
        center=config.center,
        scale=config.scale,
        epsilon=config.epsilon,
        activation_fn=config.activation_fn,
        param_initializers={
            name: _encode_initializer(initializer) for name, initializer in config.param_initializers.items()
        },
        param_regularizers={
            name: layer_pb2.Regularizer(name=regularizer.name, **regularizer.scales)
            for name, regularizer in config.param_regularizers.items()
        },
        in_place_updates=config.in_place_updates,
        updates_collections=config.updates_collections,
        variables_collections={
            name: layer_pb2.CollectionNames(names=tags) for name, tags in config.variables_collections.items()
        },
        outputs_collections=config.outputs_collections,
        trainable=config.trainable,
        data_format=config.data_format,
        zero_debias_moving_mean=config.zero_debias_moving_mean,
        renorm=config.renorm,
        renorm_clipping=config.renorm_clipping,
        renorm_decay=config.renorm_decay,
        adjustment=adjustment,
        renorm_zero_debias=config.renorm_zero_debias,
        durability=encode_durability(config.durability),
    )
    if config.fused is not None:
        message.fused = config.fused
    return message


def num_parts(layer: BatchNormLayer) -> int:
    """Returns the approximate number of parts of a layer's message, in which each variable has its tags."""
    return _TYPICAL_PARTS + _TYPICAL_VARIABLES * len(layer.config.collections)


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
) -> tuple[list[str], IncomingTensors]:
    """Reads values for variables: their names and tensors.

    Raises:
        InvalidArgumentError: There are too many, or a name is too long.
    """
    check_count(variables, MAX_VARIABLES, "variables", "variables")
    for index, each in enumerate(variables):
        check_length(each.name, MAX_NAME_BYTES, f"variables[{index}].name")
    described = [(f"variables[{index}].tensor", each.tensor) for index, each in enumerate(variables)]
    return [each.name for each in variables], decode_tensors(described, payload, user)


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


async def encode_forward(result: ForwardResult, outgoing: OutgoingTensors) -> WithContents:
    """Returns the response to a forward, with its outputs."""
    contents = Contents()

    def pieces(tensors: Iterator[tensor_pb2.Tensor]) -> list[Piece]:
        drawn_scale, drawn_bias = (None, None) if result.drawn is None else map(contents.tensor, result.drawn)
        response = messages_pb2.BatchNormForwardResponse(
            outputs=next(tensors),
            forward_id=result.forward_id,
            has_pending_updates=result.has_pending_updates,
            implementation=_IMPLEMENTATION_CODES[result.implementation],
            regularization_losses=result.regularization_losses,
            warnings=encode_ignored(result.ignored),
            drawn_adjustment_scale=drawn_scale,
            drawn_adjustment_bias=drawn_bias,
        )
        return [response]

    return await outgoing.reply(messages_pb2.BatchNormForwardResponse(), pieces, contents)


async def encode_gradients(names: Iterable[str], outgoing: OutgoingTensors) -> WithContents:
    """Returns the response to a backward, with its gradients, which have these names."""
    response = messages_pb2.BatchNormBackwardResponse()
    return await outgoing.reply(response, lambda tensors: [(name, [next(tensors)]) for name in names])


async def encode_variables(names: Iterable[str], outgoing: OutgoingTensors) -> WithContents:
    """Returns the response with variables, which have these names."""

    def pieces(tensors: Iterator[tensor_pb2.Tensor]) -> list[Piece]:
        named = (layer_pb2.NamedTensor(name=name, tensor=each) for name, each in zip(names, tensors, strict=True))
        return [Entries("variables", named)]

    return await outgoing.reply(messages_pb2.GetBatchNormVariablesResponse(), pieces)


def _given(message: Any, names: Sequence[str]) -> dict[str, float]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _decode_initializers(
    initializers: Sequence[tuple[str, layer_pb2.Initializer]], payload: Payload, user: Identity
) -> tuple[dict[str, NamedInitializer | None], IncomingTensors]:
    """Returns initializers by name, None for a tensor, and the tensors."""
    named = {name: _decode_initializer(each, f"config.param_initializers[{name}]") for name, each in initializers}
    tensors = [
        (f"config.param_initializers[{name}].tensor", each.tensor) for name, each in initializers if named[name] is None
    ]
    return named, decode_tensors(tensors, payload, user)


def _decode_initializer(initializer: layer_pb2.Initializer, field: str) -> NamedInitializer | None:
    kind = initializer.WhichOneof("kind")
    if kind == "named":
        named = initializer.named
        check_length(named.name, MAX_NAME_BYTES, f"{field}.named.name")
        parameters = _given(named, ("value", "minval", "maxval", "mean", "stddev"))
        return NamedInitializer(named.name, parameters, named.seed if named.HasField("seed") else None)
    if kind == "tensor":
        return None
    raise InvalidArgumentError("expected a tensor or a named initializer, got neither", field=field)


async def open_initializers(
    opener: TensorOpener, initializers: Mapping[str, NamedInitializer | None], tensors: IncomingTensors
) -> dict[str, Initializer]:
    """Returns initializers by name; a layer may keep referring to the memory of tensors.

    Args:
        opener: Opens the tensors.
        initializers: The initializers; None for those that are tensors.
        tensors: The tensors, in the order of `initializers`.

    Raises:
        InvalidArgumentError: A tensor is malformed.
        NotFoundError: A handle does not exist.
        MemoryError: There is no host memory for the values.
    """
    async with opener.open(tensors):
        arrays = iter(await opener.copy_to_host(tensors))
        tensors.share()
        return {
            name: TensorInitializer(next(arrays)) if initializer is None else initializer
            for name, initializer in initializers.items()
        }


def _encode_initializer(initializer: Initializer) -> layer_pb2.Initializer:
    if isinstance(initializer, TensorInitializer):
        tensor = initializer.tensor
        return layer_pb2.Initializer(tensor=tensor_pb2.Tensor(dtype=to_data_type(tensor.dtype), shape=tensor.shape))
    named = layer_pb2.NamedInitializer(name=initializer.name, seed=initializer.seed, **initializer.parameters)
    return layer_pb2.Initializer(named=named)


def _decode_adjustment(config: batch_norm_pb2.BatchNormConfig) -> RandomAdjustment | None:
    if not config.HasField("adjustment"):
        return None
    given = config.adjustment
    return RandomAdjustment(
        scale=(given.scale_min, given.scale_max),
        bias=(given.bias_min, given.bias_max),
        seed=given.seed if given.HasField("seed") else None,
    )


def _new_id(user: Identity) -> str:
    """Returns an id for a forward without one that says who owns it; empty on a server without users."""
    return secrets.token_hex(16) if user.name else ""
