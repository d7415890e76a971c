"""Optimizers of PyTorch and Optax that have a counterpart here, and what is said of those that have none."""

from collections.abc import Callable
from typing import Any

import pytest

import gradserve
from gradserve import optim

TORCH: dict[str, tuple[Callable[[Any, Any], Any], optim.Optimizer]] = {
    "sgd": (lambda torch, p: torch.optim.SGD(p, 0.1), optim.SGD(0.1)),
    "nesterov": (
        lambda torch, p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
        optim.SGD(0.7, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "dampening": (
        lambda torch, p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
        optim.SGD(0.1, momentum=0.9, dampening=0.5),
    ),
    "adam": (
        lambda torch, p: torch.optim.Adam(p, 1e-2, betas=(0.8, 0.9), eps=1e-5, fused=True),
        optim.Adam(1e-2, (0.8, 0.9), 1e-5),
    ),
    "a rate in a tensor": (
        lambda torch, p: torch.optim.Adam(p, torch.tensor(0.5), foreach=False),
        optim.Adam(0.5),
    ),
    "decoupled adam": (
        lambda torch, p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True),
        optim.AdamW(weight_decay=0.1),
    ),
    "adamw": (lambda torch, p: torch.optim.AdamW(p), optim.AdamW()),
    "adagrad": (
        lambda torch, p: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.3),
        optim.Adagrad(lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.3),
    ),
    "groups with the same settings": (
        lambda torch, p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}], 0.1),
        optim.SGD(0.1),
    ),
    "named parameters": (
        lambda torch, p: torch.optim.SGD([("w", p[0]), ("b", p[1])], 0.1),
        optim.SGD(0.1),
    ),
}


def parameters(torch: Any) -> list[Any]:
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TORCH)
def test_from_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="not installed: make install-frameworks")
    make, expected = TORCH[name]
    assert optim.from_torch(make(torch, parameters(torch))) == expected


def _scheduled(torch: Any, p: Any) -> Any:
    optimizer = torch.optim.SGD(p, 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def _with_setting(torch: Any, p: Any) -> Any:
    optimizer = torch.optim.SGD(p, 0.1)
    optimizer.param_groups[0]["cautious"] = True
    return optimizer


def _subclass(torch: Any, p: Any) -> Any:
    class SGD(torch.optim.SGD):  # type: ignore[misc]
        pass

    return SGD(p, 0.1)


TORCH_MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "maximize": (
        lambda torch, p: torch.optim.SGD(p, 0.1, maximize=True),
        "expected maximize=False for optimizer, got maximize=True",
    ),
    "amsgrad": (
        lambda torch, p: torch.optim.Adam(p, amsgrad=True),
        "expected amsgrad=False for optimizer, got amsgrad=True",
    ),
    "another": (
        lambda torch, p: torch.optim.RMSprop(p),
        "expected SGD, Adam, AdamW, Adagrad of torch.optim, not a subclass, for optimizer, got RMSprop",
    ),
    "a subclass": (_subclass, "not a subclass, for optimizer, got _subclass.<locals>.SGD"),
    "no optimizer": (lambda torch, p: None, "for optimizer, got None"),
    "a class": (lambda torch, p: torch.optim.SGD, "for optimizer, got SGD"),
    "groups": (
        lambda torch, p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.5}], 0.1),
        "in all groups of parameters for optimizer, got weight_decay=0 in group 0 and weight_decay=0.5 in group 1",
    ),
    "a scheduler": (_scheduled, "got one that a scheduler changes: give schedule instead"),
    "an unknown setting": (_with_setting, "got cautious, too"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TORCH_MISTAKES)
def test_from_torch_says_what_differs(name: str) -> None:
    torch = pytest.importorskip("torch", reason="not installed: make install-frameworks")
    make, message = TORCH_MISTAKES[name]
    with pytest.raises(gradserve.InvalidArgumentError) as caught:
        optim.from_torch(make(torch, parameters(torch)))
    assert message in caught.value.message
    assert caught.value.field == "optimizer"


OPTAX: dict[str, tuple[Callable[[Any], Any], optim.Optimizer]] = {
    "sgd": (lambda optax: optax.sgd(0.1), optim.SGD(0.1)),
    "momentum": (lambda optax: optax.sgd(0.1, momentum=0.9), optim.SGD(0.1, momentum=0.9)),
    "nesterov": (lambda optax: optax.sgd(0.1, 0.9, nesterov=True), optim.SGD(0.1, momentum=0.9, nesterov=True)),
    "momentum 0": (lambda optax: optax.sgd(0.1, 0.0, nesterov=True), optim.SGD(0.1)),
    "weight decay": (
        lambda optax: optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, 0.9)),
        optim.SGD(0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adam": (lambda optax: optax.adam(0.1, 0.8, 0.9, 1e-3), optim.Adam(0.1, (0.8, 0.9), 1e-3)),
    "adam with weight decay": (
        lambda optax: optax.chain(optax.add_decayed_weights(0.2), optax.adam(0.1)),
        optim.Adam(0.1, weight_decay=0.2),
    ),
    "adamw": (lambda optax: optax.adamw(0.1), optim.AdamW(0.1, weight_decay=1e-4)),
    "adagrad": (lambda optax: optax.adagrad(0.1), optim.adagrad_optax(0.1)),
    "adagrad, other settings": (
        lambda optax: optax.adagrad(0.1, initial_accumulator_value=0.5, eps=0.25),
        optim.adagrad_optax(0.1, 0.5, 0.25),
    ),
    "yogi": (lambda optax: optax.yogi(0.1), optim.Yogi(0.1)),
    "yogi as a chain": (
        lambda optax: optax.chain(
            optax.scale_by_yogi(0.5, 0.6, 0.1, initial_accumulator_value=0.2), optax.identity(), optax.scale(-0.25)
        ),
        optim.Yogi(0.25, (0.5, 0.6), 0.1, 0.2),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTAX)
def test_from_optax(name: str) -> None:
    optax = pytest.importorskip("optax", reason="not installed: make install-frameworks")
    make, expected = OPTAX[name]
    assert optim.from_optax(make(optax)) == expected


def _own(optax: Any) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state

    return optax.GradientTransformation(lambda params: (), update)


def _of_another_version(optax: Any) -> Any:
    tx = optax.adagrad(0.1)

    def scale_by_rss(eps: float, warp: float) -> Any:
        def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
            return updates, (eps, warp)

        update_fn.__module__ = "optax._src.transform"
        update_fn.__qualname__ = "scale_by_rss.<locals>.update_fn"
        return update_fn

    return optax.GradientTransformation(tx.init, scale_by_rss(1e-3, 2.0))


OPTAX_MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a schedule": (
        lambda optax: optax.sgd(optax.linear_schedule(0.1, 0.0, 10)),
        "got a schedule of the learning rate: give a number here",
    ),
    "clipping": (
        lambda optax: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        "got clip_by_global_norm: give clip_norm to the server",
    ),
    "a mask": (lambda optax: optax.adamw(0.1, mask={"w": True}), "got optax's masked"),
    "hyperparameters in the state": (
        lambda optax: optax.inject_hyperparams(optax.sgd)(0.1),
        "got optax's inject_hyperparams",
    ),
    "another": (lambda optax: optax.lion(0.1), "got optax's scale_by_lion"),
    "one of your own": (_own, "a transformation that Optax has made for tx, got GradientTransformation"),
    "no transformation": (lambda optax: 0.1, "a transformation that Optax has made for tx, got 0.1"),
    "an order of its own": (
        lambda optax: optax.chain(optax.adam(0.1), optax.add_decayed_weights(0.1)),
        "got a chain of scale_by_adam, scale, add_decayed_weights",
    ),
    "nothing": (lambda optax: optax.identity(), "got a chain of nothing"),
    "eps in the root": (
        lambda optax: optax.adam(0.1, eps_root=1e-3),
        "expected no eps_root of tx, which the server lacks, got 0.001",
    ),
    "nadam": (lambda optax: optax.nadam(0.1), "expected no nesterov of tx"),
    "a dtype of the state": (lambda optax: optax.adam(0.1, mu_dtype="bfloat16"), "expected no mu_dtype of tx"),
    "a dtype of the trace": (
        lambda optax: optax.sgd(0.1, 0.9, accumulator_dtype="bfloat16"),
        "expected no accumulator_dtype of tx",
    ),
    "a schedule of the decay": (
        lambda optax: optax.adamw(0.1, weight_decay=lambda count: 0.1),
        "a constant weight_decay for tx, got a schedule",
    ),
    "ascent": (
        lambda optax: optax.scale(0.1),
        "expected a negative scale at the end, minus the learning rate for tx, got 0.1",
    ),
    "another version": (
        _of_another_version,
        "whose scale_by_rss has captured eps, initial_accumulator_value for tx, got eps, init_fns, warp",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTAX_MISTAKES)
def test_from_optax_says_what_differs(name: str) -> None:
    optax = pytest.importorskip("optax", reason="not installed: make install-frameworks")
    make, message = OPTAX_MISTAKES[name]
    with pytest.raises(gradserve.InvalidArgumentError) as caught:
        optim.from_optax(make(optax))
    assert message in caught.value.message
    assert caught.value.field == "tx"
