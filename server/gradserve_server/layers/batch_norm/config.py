"""The configuration of a layer: the arguments of tf.contrib.layers.batch_norm that never change."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from sys import getsizeof
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.variables import Initializer, NamedInitializer, Regularizer
from gradserve_server.limits import MAX_NAME_BYTES
from gradserve_server.ops.activation.spec import check_activation
from gradserve_server.storage.journal import Durability

UPDATE_OPS = "update_ops"
"""tf.GraphKeys.UPDATE_OPS."""

INITIALIZED = ("beta", "gamma", "moving_mean", "moving_variance")
REGULARIZED = ("beta", "gamma")
CLIPPED = ("rmax", "rmin", "dmax")
_MAX_ENTRIES = 64
"""The limit for initializers, and for regularizers. It exceeds the number of variables: unknown names only warn."""
_MAX_COLLECTIONS = 1024


_MAX_BYTES = 1024
_TEXT_BYTES = 512
"""The memory of the references to a name or a tag."""
_FORMATS = ("NHWC", "NCHW")
_SWITCHES = {"beta": "center", "gamma": "scale"}
"""The names of the arguments that switch a variable on, by variable."""


@dataclass(frozen=True)
class IgnoredArgument:
    """An argument that has no effect.

    Attributes:
        argument: The name of the argument.
        reason: Why it has no effect.
    """

    argument: str
    reason: str


@dataclass(frozen=True)
class RandomAdjustment:
    """An adjustment drawn for each channel: scale and bias, each from [low, high)."""

    scale: tuple[float, float]
    bias: tuple[float, float]
    seed: int | None = None

    def draw(self, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns scale and bias of a draw, which depend only on the seed and the draw's number."""
        random = np.random.default_rng((self.seed or 0, number))
        with np.errstate(over="ignore"):
            scale = random.uniform(*self.scale, shape).astype(dtype)
            return scale, random.uniform(*self.bias, shape).astype(dtype)


@dataclass(frozen=True)
class BatchNormConfig:
    """The configuration of a layer, with TensorFlow's names and defaults.

    Configurations that mean the same are equal: the tags of collections are sorted, each once.

    Attributes:
        activation_fn: The name of the activation; empty for none, and "none" is stored as empty.
        in_place_updates: Whether updates are in place, as with TensorFlow's updates_collections=None.
        updates_collections: The tags of the updates; empty with `in_place_updates`.
        variables_collections: The tags of variables, by name; the empty name stands for all variables.
        renorm_zero_debias: Whether renorm has its old form, used up to TensorFlow 1.12.
        durability: What survives a restart of the server; None for the server's default.
    """

    decay: float = 0.999
    center: bool = True
    scale: bool = False
    epsilon: float = 0.001
    activation_fn: str = ""
    param_initializers: Mapping[str, Initializer] = field(default_factory=dict)
    param_regularizers: Mapping[str, Regularizer] = field(default_factory=dict)
    in_place_updates: bool = False
    updates_collections: tuple[str, ...] = (UPDATE_OPS,)
    variables_collections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs_collections: tuple[str, ...] = ()
    trainable: bool = True
    fused: bool | None = None
    data_format: str = "NHWC"
    zero_debias_moving_mean: bool = False
    renorm: bool = False
    renorm_clipping: Mapping[str, float] = field(default_factory=dict)
    renorm_decay: float = 0.99
    adjustment: RandomAdjustment | None = None
    renorm_zero_debias: bool = False
    durability: Durability | None = None

    def __post_init__(self) -> None:
        sorted_tags = {name: _as_set(tags) for name, tags in self.variables_collections.items()}
        object.__setattr__(self, "variables_collections", sorted_tags)
        object.__setattr__(self, "updates_collections", _as_set(self.updates_collections))
        object.__setattr__(self, "outputs_collections", _as_set(self.outputs_collections))
        if self.activation_fn == "none":
            object.__setattr__(self, "activation_fn", "")

    @property
    def has_default_updates(self) -> bool:
        """True if TensorFlow's layer class can do the updates."""
        return not self.in_place_updates and self.updates_collections == (UPDATE_OPS,)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors among the initializers."""
        return sum(initializer.num_bytes for initializer in self.param_initializers.values())

    @cached_property
    def text_bytes(self) -> int:
        """The memory of the names and tags, which are stored several times."""
        texts = [*self.param_initializers, *self.param_regularizers, *self.renorm_clipping, *self.variables_collections]
        texts += [*self.updates_collections, *self.outputs_collections]
        texts += [tag for tags in self.variables_collections.values() for tag in tags]
        return sum([_TEXT_BYTES + 2 * getsizeof(text) for text in texts])

    @property
    def collections(self) -> frozenset[str]:
        """The tags of variables, updates and outputs."""
        tags = {tag for tags in self.variables_collections.values() for tag in tags}
        return frozenset({*tags, *self.updates_collections, *self.outputs_collections})

    def collections_of(self, variable: str) -> tuple[str, ...]:
        """Returns the tags of a variable."""
        return (*self.variables_collections.get("", ()), *self.variables_collections.get(variable, ()))

    def has_variable(self, name: str) -> bool:
        """Returns True if the layer has the variable, which is beta or gamma."""
        return (name == "beta" and self.center) or (name == "gamma" and self.scale)

    def regularizer_of(self, variable: str) -> Regularizer | None:
        """Returns the regularizer of a variable; None if it has none or does not exist."""
        return self.param_regularizers.get(variable) if self.has_variable(variable) else None

    def check(self) -> None:
        """Checks everything that does not depend on the inputs.

        Raises:
            InvalidArgumentError: A value is invalid, or two values contradict each other.
        """
        self._check_names()
        if self.data_format not in _FORMATS:
            raise InvalidArgumentError(
                f"data_format has to be either NCHW or NHWC. Got {self.data_format!r}", field="config.data_format"
            )
        _check_decay("decay", self.decay)
        _check_decay("renorm_decay", self.renorm_decay)
        if not math.isfinite(self.epsilon):
            raise InvalidArgumentError(f"expected a finite epsilon, got {self.epsilon}", field="config.epsilon")
        if self.activation_fn:
            check_activation(self.activation_fn)
        for name, initializer in self.param_initializers.items():
            initializer.check(f"config.param_initializers[{name}]")
        for name, regularizer in self.param_regularizers.items():
            regularizer.check(f"config.param_regularizers[{name}]")
        if self.in_place_updates and self.updates_collections:
            raise InvalidArgumentError(
                f"expected no updates_collections with in_place_updates, got {', '.join(self.updates_collections)}",
                field="config.updates_collections",
            )
        if self.adjustment is not None:
            _check_range("scale", self.adjustment.scale)
            _check_range("bias", self.adjustment.bias)
        for name, bound in self.renorm_clipping.items():
            if math.isnan(bound):
                raise InvalidArgumentError(
                    f"expected a number as {name}, got {bound}", field=f"config.renorm_clipping[{name}]"
                )
        self._check_averages()

    def _check_names(self) -> None:
        """Limits the names and tags that a layer keeps."""
        _check_count(self.param_initializers, "param_initializers")
        _check_count(self.param_regularizers, "param_regularizers")
        _check_lengths(self.param_initializers, "param_initializers")
        _check_lengths(self.param_regularizers, "param_regularizers")
        _check_lengths(self.variables_collections, "variables_collections")
        _check_lengths(self.renorm_clipping, "renorm_clipping")
        count = 0
        for argument, tags in (
            ("updates_collections", self.updates_collections),
            ("outputs_collections", self.outputs_collections),
            *(("variables_collections", tags) for tags in self.variables_collections.values()),
        ):
            _check_lengths(tags, argument)
            count += len(tags)
            if "" in tags:
                raise InvalidArgumentError(
                    "expected the name of a collection, got an empty one", field=f"config.{argument}"
                )
        if count > _MAX_COLLECTIONS:
            raise InvalidArgumentError(
                f"expected at most {_MAX_COLLECTIONS} collections in all, got {count}",
                field="config.variables_collections",
            )

    def _check_averages(self) -> None:
        if self.zero_debias_moving_mean and self.decay == 1:
            raise InvalidArgumentError(
                "zero_debias_moving_mean divides by 1 - decay^n: expected a decay below 1, got 1", field="config.decay"
            )
        if not self.renorm:
            return
        if not self.has_default_updates or self.zero_debias_moving_mean:
            culprit = "zero_debias_moving_mean" if self.zero_debias_moving_mean else "updates_collections"
            raise InvalidArgumentError(
                "renorm is not supported with batch_weights, updates_collections or zero_debias_moving_mean; "
                f"got {culprit}",
                field=f"config.{culprit}",
            )
        unknown = sorted(self.renorm_clipping.keys() - set(CLIPPED))
        if unknown:
            raise InvalidArgumentError(
                f"Received invalid keys for `renorm_clipping` argument: {', '.join(unknown)}. "
                f"Supported values: {list(CLIPPED)}.",
                field="config.renorm_clipping",
            )

    def warnings(self) -> list[IgnoredArgument]:
        """Returns the arguments that have no effect in any call."""
        return [IgnoredArgument(argument, reason) for argument, reason in self._ignored()]

    def _ignored(self) -> Iterator[tuple[str, str]]:
        for argument, given, known in (
            ("param_initializers", self.param_initializers, INITIALIZED),
            ("param_regularizers", self.param_regularizers, REGULARIZED),
        ):
            for name in given:
                if name not in known:
                    yield f"{argument}[{name}]", f"it is none of {', '.join(known)}"
                elif name in REGULARIZED and not self.has_variable(name):
                    yield f"{argument}[{name}]", f"there is no {name} without {_SWITCHES[name]}"
        if not self.renorm:
            default = BatchNormConfig()
            for argument, is_default in (
                ("renorm_clipping", self.renorm_clipping == default.renorm_clipping),
                ("renorm_decay", self.renorm_decay == default.renorm_decay),
                ("renorm_zero_debias", self.renorm_zero_debias == default.renorm_zero_debias),
            ):
                if not is_default:
                    yield argument, "renorm is off"

    def with_seeds(self, draw: Callable[[], int]) -> "BatchNormConfig":
        """Returns the configuration with a new seed for each initializer and adjustment that needs one and has none."""
        initializers = {
            name: replace(initializer, seed=draw())
            if isinstance(initializer, NamedInitializer) and initializer.is_random and initializer.seed is None
            else initializer
            for name, initializer in self.param_initializers.items()
        }
        adjustment = self.adjustment
        if adjustment is not None and adjustment.seed is None:
            adjustment = replace(adjustment, seed=draw())
        return replace(self, param_initializers=initializers, adjustment=adjustment)

    def with_choices_of(self, other: "BatchNormConfig") -> "BatchNormConfig":
        """Returns the configuration with missing seeds and a missing durability taken from another one."""
        initializers = dict(self.param_initializers)
        for name, initializer in initializers.items():
            drawn = other.param_initializers.get(name)
            if isinstance(initializer, NamedInitializer) and isinstance(drawn, NamedInitializer):
                initializers[name] = replace(
                    initializer, seed=drawn.seed if initializer.seed is None else initializer.seed
                )
        adjustment = self.adjustment
        if adjustment is not None and adjustment.seed is None and other.adjustment is not None:
            adjustment = replace(adjustment, seed=other.adjustment.seed)
        durability = other.durability if self.durability is None else self.durability
        return replace(self, param_initializers=initializers, adjustment=adjustment, durability=durability)


def _as_set(tags: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(tags)))


def _check_count(entries: Mapping[str, object], argument: str) -> None:
    if len(entries) > _MAX_ENTRIES:
        raise InvalidArgumentError(
            f"expected at most {_MAX_ENTRIES} entries, got {len(entries)}", field=f"config.{argument}"
        )


def _check_lengths(names: Iterable[str], argument: str) -> None:
    longest = max((len(name.encode()) for name in names), default=0)
    if longest > MAX_NAME_BYTES:
        raise InvalidArgumentError(
            f"expected names of at most {MAX_NAME_BYTES} bytes, got one of {longest}", field=f"config.{argument}"
        )


def _check_decay(name: str, decay: float) -> None:
    if not 0 <= decay <= 1:
        raise InvalidArgumentError(f"expected a {name} from 0 to 1, got {decay}", field=f"config.{name}")


def _check_range(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InvalidArgumentError(
            f"expected finite bounds {name}_min <= {name}_max, got {low} and {high}",
            field=f"config.adjustment.{name}_min",
        )
    if not math.isfinite(high - low):
        raise InvalidArgumentError(
            f"expected a finite difference of {name}_min and {name}_max, got {low} and {high}",
            field=f"config.adjustment.{name}_min",
        )


def describe_differences(one: BatchNormConfig, other: BatchNormConfig) -> str:
    """Returns the differences, entry by entry, cut to about 1 KiB; empty if the configurations are equal."""
    found = "; ".join(
        words
        for argument in fields(BatchNormConfig)
        for words in _differences(argument.name, getattr(one, argument.name), getattr(other, argument.name))
    ).encode()
    return found.decode() if len(found) <= _MAX_BYTES else found[:_MAX_BYTES].decode(errors="ignore") + " ..."


def _differences(name: str, one: object, other: object) -> Iterator[str]:
    if one == other:
        return
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            yield from _differences(f"{name}[{key}]", one.get(key), other.get(key))
    elif isinstance(one, RandomAdjustment) and isinstance(other, RandomAdjustment):
        for part in fields(RandomAdjustment):
            yield from _differences(f"{name}.{part.name}", getattr(one, part.name), getattr(other, part.name))
    else:
        words, other_words = _words(one), _words(other)
        yield f"{name} is {words}, not {'one of other values' if words == other_words else other_words}"


def _words(value: object) -> str:
    if value is None:
        return "unset"
    if value == "":
        return "none"
    if isinstance(value, RandomAdjustment):
        return "random"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_words, value))}]"
    if isinstance(value, Durability):
        return value.value
    if isinstance(value, NamedInitializer):
        seed = {} if value.seed is None else {"seed": value.seed}
        return _with_settings(value.name, {**value.parameters, **seed})
    if isinstance(value, Regularizer):
        return _with_settings(value.name, value.scales)
    return str(value).removesuffix(".0")


def _with_settings(name: str, settings: Mapping[str, float]) -> str:
    said = " and ".join(f"{setting} {_words(value)}" for setting, value in settings.items())
    return f"{name} with {said}" if said else name
