"""What an optimizer and a scheduler are, in words, so that workers can compare theirs."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

_UNIMPORTANT = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Options of groups that change how a step is computed, not what, or that are compared as others."""
_CYCLED = frozenset({"betas", "momentum", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""Options of groups that schedulers of cycles change as they go."""
_PROGRESS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "T_cur", "T_i", "verbose"}
)
"""The part of a scheduler's state that changes as it goes."""


def settings_of(optimizer: Any, scheduler: Any, *, is_fresh: bool) -> dict[str, str]:
    """Returns the class, the options and the schedule of an optimizer, as texts by name.

    Args:
        optimizer: The optimizer.
        scheduler: Its scheduler, or None.
        is_fresh: Whether both are as they were made. Otherwise they come from a checkpoint, and only what no step
            changes is there.
    """
    found = {"optimizer": _class_name(optimizer), "scheduler": "none"}
    defaults = getattr(optimizer, "defaults", {})
    found["number of groups of parameters"] = str(len(optimizer.param_groups))
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key in _UNIMPORTANT or (not is_fresh and (key in _CYCLED or key not in defaults)):
                continue
            if key == "lr" and not is_fresh and "initial_lr" not in group:
                continue
            text = _text(group.get("initial_lr", value) if key == "lr" else value)
            if text is not None:
                found[f"{key} of group {index} of the optimizer"] = text
    if scheduler is not None:
        found |= _schedule("scheduler", scheduler, is_fresh=is_fresh)
    return found


def _schedule(title: str, scheduler: Any, *, is_fresh: bool) -> dict[str, str]:
    found = {title: _class_name(scheduler)}
    if is_fresh or type(scheduler).__module__.startswith("torch."):
        for key, value in scheduler.state_dict().items():
            text = None if key in _PROGRESS or key == "_schedulers" else _text(value)
            if text is not None:
                found[f"{key} of the {title}"] = text
    for index, inner in enumerate(getattr(scheduler, "_schedulers", ())):
        found |= _schedule(f"scheduler {index} in the {title}", inner, is_fresh=is_fresh)
    return found


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _text(value: Any) -> str | None:
    """Returns a value as a text that is equal where the value is; None for what has no such text, as functions."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, Mapping):
        return _joined("{}", (f"{key!r}: {text}" for key, text in _texts(sorted(value.items(), key=repr))), len(value))
    if isinstance(value, list | tuple):
        return _joined("()", (text for _, text in _texts(enumerate(value))), len(value))
    return None


def _texts(items: Any) -> Iterator[tuple[Any, str]]:
    for key, value in items:
        text = _text(value)
        if text is not None:
            yield key, text


def _joined(brackets: str, texts: Iterator[str], number: int) -> str | None:
    found: Collection[str] = list(texts)
    return f"{brackets[0]}{', '.join(found)}{brackets[1]}" if len(found) == number else None
