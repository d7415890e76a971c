"""Describes in which arguments two configurations of a layer differ, for clients in any language."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from gradserve_server.layers.batch_norm.config import BatchNormConfig, RandomAdjustment
from gradserve_server.layers.initializers import NamedInitializer
from gradserve_server.layers.regularizers import Regularizer
from gradserve_server.state.durability import Durability

_MAX_BYTES = 1024


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
