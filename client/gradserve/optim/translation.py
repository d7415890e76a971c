"""Translates optimizers of PyTorch and Optax, as far as the server computes exactly the same; imports neither."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradserve.conversion.plain import as_flag, as_number
from gradserve.optim.optimizers import SGD, Adagrad, AdagradOptax, Adam, AdamW, Optimizer, Yogi
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.errors import InvalidArgumentError

_TORCH = Argument("optimizer")
_OPTAX = Argument("tx")

# PyTorch

_SETTINGS: Mapping[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "torch.optim.sgd.SGD": (SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "torch.optim.adam.Adam": (Adam, ("lr", "betas", "eps", "weight_decay")),
    "torch.optim.adamw.AdamW": (AdamW, ("lr", "betas", "eps", "weight_decay")),
    "torch.optim.adagrad.Adagrad": (
        Adagrad,
        ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    ),
}
_OF_NO_CONSEQUENCE = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Settings that say which parameters there are, or how PyTorch computes the same numbers."""
_DECOUPLED = "decoupled_weight_decay"
_UNSUPPORTED = ("maximize", "amsgrad")


def from_torch(optimizer: Any) -> Optimizer:
    """Returns the optimizer with the equations and settings of one of PyTorch: SGD, Adam, AdamW or Adagrad.

    Settings of how PyTorch computes, such as `foreach` and `fused`, do not matter. The state stays where it is: the
    server begins with an empty one.

    Args:
        optimizer: The optimizer.

    Raises:
        InvalidArgumentError: It is another optimizer, or one of a class derived from these; its groups of parameters
            have different settings; it has a setting that the server does not have, such as `maximize` or `amsgrad`; or
            a learning rate scheduler changes its rate: give the rate here, and `schedule` to the server.
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if kind not in _SETTINGS:
        known = ", ".join(name.rpartition(".")[2] for name in _SETTINGS)
        raise _TORCH.error(f"{known} of torch.optim, not a subclass,", optimizer)
    group = _only_group(optimizer.param_groups)
    if "initial_lr" in group:
        raise _TORCH.error_saying("a constant learning rate", "one that a scheduler changes: give schedule instead")
    for name in _UNSUPPORTED:
        if group.get(name):
            raise _TORCH.error_saying(f"{name}=False", f"{name}={described(group[name])}, which the server lacks")
    made, names = _SETTINGS[kind]
    if made is Adam and group.get(_DECOUPLED):
        made = AdamW
    unknown = group.keys() - _OF_NO_CONSEQUENCE - set(names) - {*_UNSUPPORTED, _DECOUPLED}
    if unknown:
        raise _TORCH.error_saying(f"the settings {', '.join(names)}", f"{', '.join(sorted(unknown))}, too")
    return made(**{name: group[name] for name in names})


def _only_group(groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the group of parameters, or the first of several with the same settings."""
    first, *others = groups
    for index, group in enumerate(others, 1):
        for name in sorted((first.keys() | group.keys()) - _OF_NO_CONSEQUENCE):
            own, other = first.get(name), group.get(name)
            if own != other:
                raise _TORCH.error_saying(
                    "the same settings in all groups of parameters",
                    f"{name}={described(own)} in group 0 and {name}={described(other)} in group {index}",
                )
    return first


# Optax

_CAPTURED: Mapping[str, frozenset[str]] = {
    "scale": frozenset({"step_size"}),
    "trace": frozenset({"accumulator_dtype", "decay", "nesterov"}),
    "add_decayed_weights": frozenset({"weight_decay"}),
    "scale_by_adam": frozenset({"b1", "b2", "eps", "eps_root", "mu_dtype", "nesterov"}),
    "scale_by_rss": frozenset({"eps", "initial_accumulator_value"}),
    "scale_by_yogi": frozenset({"b1", "b2", "eps", "eps_root", "initial_accumulator_value"}),
}
"""The transformations that are known, with the variables that their functions have captured."""

_HINTS = {
    "scale_by_schedule": "a schedule of the learning rate: give a number here, and schedule to the server",
    "clip_by_global_norm": "clip_by_global_norm: give clip_norm to the server",
}

_Parts = dict[str, dict[str, Any]]


def _sgd(parts: _Parts) -> Optimizer:
    trace = parts.get("trace", {"decay": 0.0, "nesterov": False, "accumulator_dtype": None})
    _check("accumulator_dtype", trace["accumulator_dtype"])
    momentum = _number("momentum", trace["decay"])
    nesterov = as_flag(trace["nesterov"], _OPTAX) and momentum != 0  # which is the same without a momentum
    return SGD(_rate(parts), momentum=momentum, weight_decay=_decay(parts), nesterov=nesterov)


def _adam(made: type[Adam] | type[AdamW]) -> Callable[[_Parts], Optimizer]:
    def make(parts: _Parts) -> Optimizer:
        adam = parts["scale_by_adam"]
        _check("mu_dtype", adam["mu_dtype"])
        _check("nesterov", adam["nesterov"])
        return made(_rate(parts), _betas(adam), _number("eps", adam["eps"]), _decay(parts))

    return make


def _adagrad(parts: _Parts) -> Optimizer:
    rss = parts["scale_by_rss"]
    return AdagradOptax(_rate(parts), *(_number(name, rss[name]) for name in ("initial_accumulator_value", "eps")))


def _yogi(parts: _Parts) -> Optimizer:
    yogi = parts["scale_by_yogi"]
    numbers = (_number(name, yogi[name]) for name in ("eps", "initial_accumulator_value"))
    return Yogi(_rate(parts), _betas(yogi), *numbers)


_CHAINS: Mapping[tuple[str, ...], Callable[[_Parts], Optimizer]] = {
    ("scale",): _sgd,
    ("trace", "scale"): _sgd,
    ("add_decayed_weights", "scale"): _sgd,
    ("add_decayed_weights", "trace", "scale"): _sgd,
    ("scale_by_adam", "scale"): _adam(Adam),
    ("add_decayed_weights", "scale_by_adam", "scale"): _adam(Adam),
    ("scale_by_adam", "add_decayed_weights", "scale"): _adam(AdamW),
    ("scale_by_rss", "scale"): _adagrad,
    ("scale_by_yogi", "scale"): _yogi,
}
"""The chains of transformations that are optimizers of the server."""


def from_optax(tx: Any) -> Optimizer:
    """Returns the optimizer with the equations and settings of a transformation of Optax.

    A transformation is a pair of closures, which say nothing about themselves. Those that Optax makes are recognised by
    the functions that they are, and their settings read from the variables that these have captured: `optax.sgd`,
    `adam`, `adamw`, `adagrad` and `yogi` with a number as the rate, and the same written as chains of `scale`,
    `scale_by_learning_rate`, `trace`, `add_decayed_weights` and `scale_by_...`. All others are refused: schedules,
    masks, `inject_hyperparams`, clipping, transformations of your own.

    Args:
        tx: The transformation.

    Raises:
        InvalidArgumentError: It is not one of these, or has a setting that the server does not have, such as an
            `eps_root`; or it is of a version of Optax that captures other variables.
    """
    found = _transformations(getattr(tx, "init", None), getattr(tx, "update", None), tx)
    names = tuple(name for name, _ in found)
    if names not in _CHAINS:
        known = "optax.sgd, adam, adamw, adagrad or yogi, or a chain that is the same,"
        raise _OPTAX.error_saying(known, f"a chain of {', '.join(names) or 'nothing'}")
    return _CHAINS[names](dict(found))


def _transformations(init: Any, update: Any, tx: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns the transformations of a chain by name, each with its captured variables."""
    name = _maker(update)
    if name is None:
        raise _OPTAX.error("a transformation that Optax has made", tx)
    captured = _captured(update)
    if name == "with_extra_args_support" and "tx" in captured:
        return _transformations(captured["tx"].init, captured["tx"].update, tx)
    own = _captured(init)
    if name == "chain" and "init_fns" in own and "update_fns" in captured:
        pairs = zip(own["init_fns"], captured["update_fns"], strict=True)
        return [found for pair in pairs for found in _transformations(*pair, tx)]
    if name == "identity":
        return []
    if name not in _CAPTURED:
        raise _OPTAX.error_saying("transformations that the server has, too", _HINTS.get(name, f"optax's {name}"))
    values = own | captured
    if values.keys() != _CAPTURED[name]:
        raise _OPTAX.error_saying(
            f"a version of Optax whose {name} has captured {', '.join(sorted(_CAPTURED[name]))}",
            ", ".join(sorted(values)) or "nothing",
        )
    return [(name, values)]


def _maker(function: Any) -> str | None:
    """Returns the name of the function of Optax that has made this one."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    maker, is_local, _ = name.partition(".<locals>.")
    return maker if isinstance(module, str) and module.startswith("optax.") and is_local else None


def _captured(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _rate(parts: _Parts) -> float:
    rate = -_number("step_size", parts["scale"]["step_size"])
    if rate < 0:
        raise _OPTAX.error_saying("a negative scale at the end, minus the learning rate", repr(-rate))
    return rate


def _decay(parts: _Parts) -> float:
    return _number("weight_decay", parts.get("add_decayed_weights", {"weight_decay": 0.0})["weight_decay"])


def _betas(captured: Mapping[str, Any]) -> tuple[float, float]:
    _check("eps_root", captured["eps_root"])
    return _number("b1", captured["b1"]), _number("b2", captured["b2"])


def _number(name: str, value: Any) -> float:
    if callable(value):
        raise _OPTAX.error_saying(f"a constant {name}", "a schedule")
    return as_number(value, Argument(f"{name} of tx", field=_OPTAX.name))


def _check(name: str, value: Any) -> None:
    """Checks that a setting is not set, as the server does not have it."""
    if value:
        raise InvalidArgumentError(
            f"expected no {name} of tx, which the server lacks, got {described(value)}", field=_OPTAX.name
        )
