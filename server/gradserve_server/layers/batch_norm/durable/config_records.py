"""Configurations as records."""

import base64
from dataclasses import asdict
from typing import Any

import ml_dtypes  # noqa: F401  (its dtypes have names from then on)
import numpy as np

from gradserve_server.layers.batch_norm.config import BatchNormConfig, RandomAdjustment
from gradserve_server.layers.batch_norm.records import Record
from gradserve_server.layers.initializers import Initializer, NamedInitializer, TensorInitializer
from gradserve_server.layers.regularizers import Regularizer
from gradserve_server.state.durability import Durability

_PLAIN = (
    *("decay", "center", "scale", "epsilon", "activation_fn", "in_place_updates", "trainable", "fused"),
    *("data_format", "zero_debias_moving_mean", "renorm", "renorm_decay", "renorm_zero_debias"),
)
_TAGS = ("updates_collections", "outputs_collections")


def config_record(config: BatchNormConfig) -> Record:
    """Returns a configuration in types that JSON has; the reverse of `config_of`."""
    assert config.durability is not None, "the kind has chosen one"
    return {
        **{name: getattr(config, name) for name in (*_PLAIN, *_TAGS)},
        "param_initializers": {name: _initializer_record(each) for name, each in config.param_initializers.items()},
        "param_regularizers": {
            name: [each.name, dict(each.scales)] for name, each in config.param_regularizers.items()
        },
        "variables_collections": dict(config.variables_collections),
        "renorm_clipping": dict(config.renorm_clipping),
        "adjustment": None if config.adjustment is None else asdict(config.adjustment),
        "durability": config.durability.value,
    }


def config_of(record: Record) -> BatchNormConfig:
    """Returns the configuration of a record.

    Raises:
        ServiceError, ValueError, TypeError, KeyError: It is no such record.
    """
    plain: dict[str, Any] = {name: record[name] for name in _PLAIN}
    tags: dict[str, Any] = {name: tuple(record[name]) for name in _TAGS}
    adjustment = record["adjustment"]
    return BatchNormConfig(
        **plain,
        **tags,
        param_initializers={name: _initializer_of(each) for name, each in record["param_initializers"].items()},
        param_regularizers={
            name: Regularizer(kind, scales) for name, (kind, scales) in record["param_regularizers"].items()
        },
        variables_collections={name: tuple(tags) for name, tags in record["variables_collections"].items()},
        renorm_clipping=record["renorm_clipping"],
        adjustment=None
        if adjustment is None
        else RandomAdjustment(tuple(adjustment["scale"]), tuple(adjustment["bias"]), adjustment["seed"]),
        durability=Durability(record["durability"]),
    )


def _initializer_record(initializer: Initializer) -> Record:
    if isinstance(initializer, NamedInitializer):
        return {"name": initializer.name, "parameters": dict(initializer.parameters), "seed": initializer.seed}
    tensor = initializer.tensor
    return {
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": base64.b64encode(tensor.tobytes()).decode(),
    }


def _initializer_of(record: Record) -> Initializer:
    if "name" in record:
        return NamedInitializer(record["name"], record["parameters"], record["seed"])
    content = base64.b64decode(record["bytes"], validate=True)
    return TensorInitializer(np.frombuffer(content, np.dtype(record["dtype"])).reshape(record["shape"]))
