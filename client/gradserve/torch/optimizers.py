"""Optimizers and schedulers: kept at the step of the run, and put in words, so that workers can compare theirs."""

import inspect
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

_UNIMPORTANT = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Options of groups that change how a step is computed, not what, or that are compared as others."""
_CYCLED = frozenset({"betas", "momentum", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""Options of groups that schedulers of cycles change as they go."""
_PROGRESS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "T_cur", "T_i", "verbose"}
)
"""The part of a scheduler's state that changes as it goes."""
_WRAPPERS = frozenset(
    {(package, "LightningOptimizer") for package in ("lightning", "pytorch_lightning")}
    | {(package, "_FabricOptimizer") for package in ("lightning", "lightning_fabric")}
    | {(package, "LRSchedulerConfig") for package in ("lightning", "pytorch_lightning", "lightning_fabric")}
    | {("accelerate", "AcceleratedOptimizer"), ("accelerate", "AcceleratedScheduler")}
)
"""Packages and classes that pass on the steps of one optimizer or scheduler, and take none themselves."""
_log = logging.getLogger(__name__)
_BY_EPOCH = (
    "a schedule by epochs is one by steps, too: LambdaLR(optimizer, lambda step: factor(step // steps_per_epoch))"
)


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


class Schedule:
    """A scheduler that takes one step with each step of the run, however often it is called.

    Workers have equal learning rates at equal steps only if their schedulers have taken the same steps.
    """

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        """Takes an optimizer, in the wrappers that the program steps, and its scheduler or None.

        Raises:
            InvalidArgumentError: The scheduler goes by something that differs between workers, or is of another
                optimizer; or the optimizer has one and None was given.
        """
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._class: type[Any] = type(scheduler)
        self._is_due = False
        """True if the program has to call `step` before the next step of the optimizer."""
        self._is_skipped = False
        """True if the program's next call is for a step that came with another worker's state."""
        self._has_warned = False
        check_schedule(optimizer, scheduler, "average_gradients")

    def begin(self) -> None:
        """Takes over the scheduler's `step`."""
        if self._scheduler is None:
            return
        schedule, base = self, self._class

        def step(scheduler: Any, *given: Any, **named: Any) -> None:
            if schedule._takes_step():
                base.step(scheduler, *given, **named)

        # A class of its own rather than an attribute, which would be part of the scheduler's state.
        names = {"step": step, "__module__": base.__module__, "__qualname__": base.__qualname__}
        self._scheduler.__class__ = type(base.__name__, (base,), names)

    def end(self) -> None:
        """Gives the scheduler's `step` back. Can be called again."""
        if self._scheduler is not None:
            self._scheduler.__class__ = self._class

    def check_step(self) -> None:
        """Checks that the program has stepped the scheduler after the optimizer's last step.

        Raises:
            InvalidArgumentError: It has not; or it has made a scheduler since the block began.
        """
        if self._scheduler is None:
            check_schedule(self._optimizer, None, "average_gradients")
        elif self._is_due:
            raise InvalidArgumentError(
                "the scheduler was not stepped after the last step of the optimizer: call scheduler.step() once after "
                f"each optimizer.step(), as a late worker does for the steps that it missed; {_BY_EPOCH}",
                field="scheduler",
            )

    def missed_step(self) -> None:
        """Takes the scheduler's step after a step of the optimizer that the program has not taken itself."""
        if self._scheduler is not None:
            self._class.step(self._scheduler)

    def own_step(self, *, is_behind: bool) -> None:
        """Notes a step of the optimizer that the program takes; `is_behind` if the scheduler has its step yet to do."""
        self._is_due = self._scheduler is not None and is_behind
        self._is_skipped = not is_behind

    def _takes_step(self) -> bool:
        if self._is_due:
            self._is_due = False
            return True
        if self._is_skipped:
            self._is_skipped = False
        elif not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a call of scheduler.step() without a step of the run before it changes nothing: learning rates are "
                "those of the run's step. That is so after a step that a GradScaler has skipped, too"
            )
        return False


def check_schedule(optimizer: Any, scheduler: Any, user: str) -> None:
    """Checks that workers with this scheduler of the optimizer, or None, have equal learning rates at equal steps.

    Args:
        optimizer: The optimizer, in the wrappers that the program steps: the scheduler may have been made for those.
        scheduler: Its scheduler, or None.
        user: The function or class that was given both, as an error names it.

    Raises:
        InvalidArgumentError: The scheduler goes by something that differs between workers, or is of another optimizer;
            or the optimizer has one and None was given.
    """
    if scheduler is not None:
        _check(optimizer, scheduler, user)
    elif has_schedule(optimizer):
        raise InvalidArgumentError(
            f"the optimizer has a learning rate scheduler, which {user} was not given: late workers and those that "
            "join would have other learning rates than the others. Pass it as scheduler=..., several of them in a "
            "torch.optim.lr_scheduler.ChainedScheduler",
            field="scheduler",
        )


def unwrapped(optimizer: Any, name: str = "optimizer") -> Any:
    """Returns the optimizer in the wrappers that Accelerate and Lightning put around it, whose hooks are called.

    Wrappers of other libraries stay, as the steps that they take may be others.

    Args:
        optimizer: The optimizer.
        name: The name of the argument, as an error has it.

    Raises:
        InvalidArgumentError: It is no optimizer of PyTorch.
    """
    *_, optimizer = _layers(optimizer)
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise Argument(name).error_saying("a torch.optim.Optimizer", type(optimizer).__qualname__)
    return optimizer


def unwrapped_scheduler(scheduler: Any) -> Any:
    """Returns the scheduler in what Accelerate and Lightning put around it; None for None."""
    while _is_wrapper(scheduler):
        scheduler = scheduler.scheduler
    return scheduler


def _layers(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and what is in it, from the outermost wrapper to the optimizer itself."""
    yield optimizer
    while _is_wrapper(optimizer):
        optimizer = optimizer.optimizer
        yield optimizer


def _is_wrapper(value: Any) -> bool:
    classes = {(each.__module__.partition(".")[0], each.__name__) for each in type(value).__mro__}
    return not classes.isdisjoint(_WRAPPERS)


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def has_schedule(optimizer: Any) -> bool:
    """Returns True if a learning rate scheduler was made for an optimizer, or for a wrapper of it."""
    return any(hasattr(each.step, "_wrapped_by_lr_sched") for each in _layers(optimizer))


def with_own_gradients(optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Sees to it that the gradients of a step are there before it: calls its closure, if it has one.

    Args:
        optimizer: The optimizer.
        args: What its `step` was called with, as hooks get it: the optimizer first.
        kwargs: Likewise.

    Returns:
        The arguments for the rest of the step, with a closure that returns the loss and computes nothing; None if there
        was no closure.

    Raises:
        InvalidArgumentError: The optimizer calls closures several times in a step, or gradients are scaled.
    """
    given = [each for each in (*args[1:], *kwargs.values()) if each is not None]
    if given and (len(given) > 1 or not callable(given[0]) or isinstance(optimizer, torch.optim.LBFGS)):
        raise InvalidArgumentError(
            "expected optimizer.step() without arguments or with a closure that it calls once, got "
            f"{type(optimizer).__qualname__}.step({', '.join(type(each).__qualname__ for each in given)}); optimizers "
            "that compute several gradients in a step, such as LBFGS, cannot be used",
            field="closure",
        )
    if getattr(optimizer, "grad_scale", None) is not None:
        raise InvalidArgumentError(
            "a GradScaler has left unscaling to the optimizer, so gradients still have this worker's own scale; "
            "call scaler.unscale_(optimizer) before scaler.step(optimizer), or make the optimizer with "
            "fused=False",
            field="optimizer",
        )
    if not given:
        return None
    (closure,) = given
    with torch.enable_grad():
        once = _Once(closure())
    replaced = {key: once if each is closure else each for key, each in kwargs.items()}
    return tuple(once if each is closure else each for each in args), replaced


class _Once:
    """A closure that was called already: it returns its loss to the optimizer, which may ask for it once."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._is_used = False

    def __call__(self) -> Any:
        if self._is_used:
            raise InvalidArgumentError(
                "the optimizer calls its closure a second time in a step, for gradients that would not be averaged: it "
                "cannot be used",
                field="closure",
            )
        self._is_used = True
        return self._loss


def steps_of(scheduler: Any) -> int:
    """Returns the number of steps that a scheduler has taken; 0 for None."""
    inner = getattr(scheduler, "_schedulers", None)
    number: int = getattr(scheduler, "last_epoch", None) or (steps_of(inner[0]) if inner else 0)
    return number


def take_steps(scheduler: Any, number: int) -> None:
    """Lets a scheduler take steps that belong to steps of other workers' optimizers; None for no scheduler."""
    if scheduler is None:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the optimizer's
        for _ in range(number):
            scheduler.step()


def _check(optimizer: Any, scheduler: Any, user: str) -> None:
    if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
        raise InvalidArgumentError(
            f"expected a learning rate scheduler for scheduler, got {type(scheduler).__qualname__}", field="scheduler"
        )
    *_, own = _layers(optimizer)
    *_, other = _layers(getattr(scheduler, "optimizer", optimizer))
    if own is not other:
        raise InvalidArgumentError(
            f"expected a scheduler of the optimizer that {user} was given, got one of another optimizer",
            field="scheduler",
        )
    needed = [
        name
        for name, each in inspect.signature(scheduler.step).parameters.items()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    if needed or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InvalidArgumentError(
            f"{type(scheduler).__qualname__} goes by {needed[0] if needed else 'metrics'}, which each worker has other "
            "values of, so learning rates would differ between workers. Use a scheduler that depends on the step alone",
            field="scheduler",
        )
    for inner in getattr(scheduler, "_schedulers", ()):
        _check(optimizer, inner, user)
