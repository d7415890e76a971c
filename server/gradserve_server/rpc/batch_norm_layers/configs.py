"""Conversion of layers' configurations between messages and domain values."""

from collections.abc import Sequence
from typing import Any

from gradserve.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve.v1 import layer_pb2, tensor_pb2
from gradserve.wire.tensors import to_data_type
from gradserve_server.errors import InvalidArgumentError, request_fields
from gradserve_server.layers.batch_norm.config import UPDATE_OPS, BatchNormConfig, RandomAdjustment
from gradserve_server.layers.batch_norm.given import open_initializer
from gradserve_server.layers.initializers import Initializer, NamedInitializer, TensorInitializer
from gradserve_server.layers.regularizers import Regularizer
from gradserve_server.limits import MAX_NAME_BYTES, check_count, check_length
from gradserve_server.rpc.boundary.fields import decode_durability, encode_durability
from gradserve_server.rpc.tensors.messages import decode_reference
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.opening import TensorOpener
from gradserve_server.tensors.payload import Payload

MAX_ENTRIES = 1 << 10
"""The limit of entries in each field of collections, initializers or regularizers."""
_DEFAULTS = BatchNormConfig()


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
        initializers = {
            name: await _decode_initializer(initializer, opener, payload, user, f"config.param_initializers[{name}]")
            for name, initializer in sorted(config.param_initializers.items())
        }
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


def _given(message: Any, names: Sequence[str]) -> dict[str, float]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


async def _decode_initializer(
    initializer: layer_pb2.Initializer, opener: TensorOpener, payload: Payload, user: Identity, field: str
) -> Initializer:
    kind = initializer.WhichOneof("kind")
    if kind == "named":
        named = initializer.named
        check_length(named.name, MAX_NAME_BYTES, f"{field}.named.name")
        parameters = _given(named, ("value", "minval", "maxval", "mean", "stddev"))
        return NamedInitializer(named.name, parameters, named.seed if named.HasField("seed") else None)
    if kind == "tensor":
        return await open_initializer(opener, decode_reference(initializer.tensor, payload, user), f"{field}.tensor")
    raise InvalidArgumentError("expected a tensor or a named initializer, got neither", field=field)


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
