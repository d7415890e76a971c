"""Converts the arguments of a batch normalization layer to a message, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from gradserve.batch_norm import Initializer, RandomAdjustment, Regularizer
from gradserve.calls.arguments import as_durability, as_op_input
from gradserve.calls.tensors import OpInput
from gradserve.conversion.plain import as_list, as_mapping, as_number, is_text, plain_field
from gradserve.results import DenseSpec, TensorLike
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.tensors import to_dtype
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, tensor_pb2

InitialValue: TypeAlias = TensorLike | Initializer | str
Collections: TypeAlias = str | Sequence[str]
ValueT = TypeVar("ValueT")

# As precise as any variable; the server converts.
_INITIAL_DTYPE = np.dtype(np.float64)
_ALL_VARIABLES = ""
_INITIALIZER_PARAMETERS = ("value", "minval", "maxval", "mean", "stddev", "seed")
_PLAIN_ARGUMENTS = (
    *("decay", "center", "scale", "epsilon", "trainable", "data_format", "zero_debias_moving_mean"),
    *("renorm", "renorm_decay", "renorm_zero_debias"),
)


@dataclass(frozen=True, eq=False)
class BatchNormArguments:
    """The arguments of `Client.batch_norm` that make up a layer's configuration."""

    decay: float
    center: bool
    scale: bool
    epsilon: float
    activation_fn: str | None
    param_initializers: Mapping[str, InitialValue | None] | None
    param_regularizers: Mapping[str, Regularizer | None] | None
    updates_collections: Collections | None
    variables_collections: Collections | Mapping[str, Collections] | None
    outputs_collections: Collections | None
    trainable: bool
    fused: bool | None
    data_format: str
    zero_debias_moving_mean: bool
    renorm: bool
    renorm_clipping: Mapping[str, float] | None
    renorm_decay: float
    adjustment: RandomAdjustment | None
    renorm_zero_debias: bool
    durability: str | None

    def initial_tensors(self) -> dict[str, OpInput]:
        """Returns the initial values that are arrays or handles, by variable."""
        return {
            name: as_op_input(value, _INITIAL_DTYPE, f"the initial {name}", field="param_initializers")
            for name, value in _by_name(self.param_initializers, "param_initializers").items()
            if value is not None and not isinstance(value, Initializer | str)
        }

    def message(self, initial_tensors: Mapping[str, tensor_pb2.Tensor]) -> batch_norm_pb2.BatchNormConfig:
        """Returns the arguments as a message, which takes the `initial_tensors` as given here.

        Raises:
            InvalidArgumentError: An argument does not fit into the message; `field` is its name.
        """
        config = batch_norm_pb2.BatchNormConfig(durability=as_durability(self.durability))
        for name in _PLAIN_ARGUMENTS:
            _set(config, name, getattr(self, name), name)
        if self.activation_fn is not None and not _is_no_activation(self.activation_fn):
            _set(config, "activation_fn", self.activation_fn, "activation_fn")
        if self.fused is not None:
            _set(config, "fused", self.fused, "fused")
        for name, value in _by_name(self.param_initializers, "param_initializers").items():
            if name in initial_tensors:
                config.param_initializers[name].tensor.CopyFrom(initial_tensors[name])
            elif value is not None:
                named = value if isinstance(value, Initializer) else Initializer(str(value))
                config.param_initializers[name].named.CopyFrom(_named_initializer(named))
        for name, regularizer in _by_name(self.param_regularizers, "param_regularizers").items():
            if regularizer is not None:
                config.param_regularizers[name].CopyFrom(_regularizer(regularizer))
        self._set_collections(config)
        for name, bound in _by_name(self.renorm_clipping, "renorm_clipping").items():
            config.renorm_clipping[name] = as_number(bound, Argument(name, "renorm_clipping"))
        if self.adjustment is not None:
            config.adjustment.CopyFrom(_adjustment(self.adjustment))
        return config

    def _set_collections(self, config: batch_norm_pb2.BatchNormConfig) -> None:
        config.in_place_updates = self.updates_collections is None
        if self.updates_collections is not None:
            config.updates_collections.extend(_names(self.updates_collections, "updates_collections"))
            if not config.updates_collections:
                raise InvalidArgumentError(
                    "expected at least one collection, or None to update in place, got none",
                    field="updates_collections",
                )
        if isinstance(self.variables_collections, Mapping):
            for name, names in _by_name(self.variables_collections, "variables_collections").items():
                config.variables_collections[name].names.extend(_names(names, "variables_collections"))
        elif self.variables_collections is not None:
            tags = _names(self.variables_collections, "variables_collections")
            config.variables_collections[_ALL_VARIABLES].names.extend(tags)
        if self.outputs_collections is not None:
            config.outputs_collections.extend(_names(self.outputs_collections, "outputs_collections"))


def read_arguments(config: batch_norm_pb2.BatchNormConfig) -> dict[str, Any]:
    """Returns the arguments in a message, by their names in `Client.batch_norm`."""
    arguments: dict[str, Any] = {name: getattr(config, name) for name in _PLAIN_ARGUMENTS}
    tags = {name: _joined(tagged.names) for name, tagged in config.variables_collections.items()}
    return arguments | {
        "activation_fn": None if _is_no_activation(config.activation_fn) else config.activation_fn,
        "param_initializers": {name: _initial_value(each) for name, each in config.param_initializers.items()} or None,
        "param_regularizers": {
            name: Regularizer(each.name, l1=_optional(each, "l1"), l2=_optional(each, "l2"))
            for name, each in config.param_regularizers.items()
        }
        or None,
        "updates_collections": None if config.in_place_updates else _joined(config.updates_collections),
        "variables_collections": tags[_ALL_VARIABLES] if tags.keys() == {_ALL_VARIABLES} else tags or None,
        "outputs_collections": _joined(config.outputs_collections) or None,
        "fused": _optional(config, "fused"),
        "renorm_clipping": dict(config.renorm_clipping) or None,
        "adjustment": _random_adjustment(config.adjustment) if config.HasField("adjustment") else None,
    }


def _set(message: Any, field: str, value: Any, argument: str) -> None:
    setattr(message, field, plain_field(message, field, value, Argument(field, argument)))


def _is_no_activation(name: str) -> bool:
    return isinstance(name, str) and name in ("", "none")


def _by_name(values: Mapping[str, ValueT] | None, argument: str) -> Mapping[str, ValueT]:
    """Returns values by name, after a check that the names can be sent."""
    return {} if values is None else as_mapping(values, Argument(argument))


def _names(collections: Collections, argument: str) -> list[str]:
    if isinstance(collections, str):
        names = [collections]
    else:
        names = as_list(collections, "names of collections", Argument(argument))
    if not all(is_text(name) for name in names):
        raise Argument(argument).error("names of collections", collections)
    return names


def _joined(names: Sequence[str]) -> Collections:
    return names[0] if len(names) == 1 else tuple(names)


def _named_initializer(initializer: Initializer) -> layer_pb2.NamedInitializer:
    named = layer_pb2.NamedInitializer()
    _set(named, "name", initializer.name, "param_initializers")
    for parameter in _INITIALIZER_PARAMETERS:
        value = getattr(initializer, parameter)
        if value is not None:
            _set(named, parameter, value, "param_initializers")
    return named


def _initial_value(message: layer_pb2.Initializer) -> Initializer | DenseSpec:
    if message.WhichOneof("kind") == "tensor":
        return DenseSpec(to_dtype(message.tensor.dtype), tuple(message.tensor.shape))
    parameters = {name: _optional(message.named, name) for name in _INITIALIZER_PARAMETERS}
    return Initializer(message.named.name, **parameters)


def _regularizer(regularizer: Regularizer) -> layer_pb2.Regularizer:
    if not isinstance(regularizer, Regularizer):
        raise InvalidArgumentError(
            f"expected a Regularizer or None, got {described(regularizer)}", field="param_regularizers"
        )
    message = layer_pb2.Regularizer()
    _set(message, "name", regularizer.name, "param_regularizers")
    for weight in ("l1", "l2"):
        value = getattr(regularizer, weight)
        if value is not None:
            _set(message, weight, value, "param_regularizers")
    return message


def _adjustment(adjustment: RandomAdjustment) -> batch_norm_pb2.RandomAdjustment:
    if not isinstance(adjustment, RandomAdjustment):
        raise InvalidArgumentError(
            f"expected a RandomAdjustment or None, got {described(adjustment)}; pass tensors to the layer's calls",
            field="adjustment",
        )
    message = batch_norm_pb2.RandomAdjustment()
    for name in ("scale", "bias"):
        bounds = getattr(adjustment, name)
        try:
            low, high = bounds
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"expected a pair, (low, high), as {name} of a RandomAdjustment, got {described(bounds)}",
                field="adjustment",
            ) from None
        _set(message, f"{name}_min", low, "adjustment")
        _set(message, f"{name}_max", high, "adjustment")
    if adjustment.seed is not None:
        _set(message, "seed", adjustment.seed, "adjustment")
    return message


def _random_adjustment(message: batch_norm_pb2.RandomAdjustment) -> RandomAdjustment:
    return RandomAdjustment(
        scale=(message.scale_min, message.scale_max),
        bias=(message.bias_min, message.bias_max),
        seed=_optional(message, "seed"),
    )


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
