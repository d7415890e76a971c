"""Optimizers and schedulers in the wrappers of Accelerate and Lightning, which `gradserve.torch` looks into."""

from collections.abc import Callable
from typing import Any

import pytest

import gradserve

pytest.importorskip("torch", reason="not installed: make install-frameworks")

import torch
from torch.optim.lr_scheduler import ExponentialLR

from gradserve.torch import DiLoCo, ParameterServer, average_gradients

pytestmark = pytest.mark.filterwarnings("ignore")  # these packages are others'


def package(name: str) -> Any:
    return pytest.importorskip(name, reason="not installed: make install-frameworks")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "Accelerate": lambda optimizer: package("accelerate").Accelerator(cpu=True).prepare(optimizer),
    "Lightning": lambda optimizer: package("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer),
    "Fabric": lambda optimizer: package("lightning.fabric.wrappers")._FabricOptimizer(optimizer, strategy=None),
}
BLOCKS: dict[str, Callable[..., Any]] = {
    "average_gradients": average_gradients,
    "ParameterServer": ParameterServer,
    "DiLoCo": lambda *given, **named: DiLoCo(*given, **named, sync_every=1),
}


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(4, 1)


@pytest.fixture
def optimizer(model: torch.nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_steps_of_the_optimizer_within_are_those_of_the_run(
    client: gradserve.Client, name: str, model: torch.nn.Module, optimizer: Any, wrap: Any, block: Any
) -> None:
    with block(client, model, wrap(optimizer), name=name, num_required=1) as run:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        assert run.step == 1


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_scheduler_that_was_made_for_a_wrapper_is_missed(
    client: gradserve.Client, name: str, model: torch.nn.Module, optimizer: Any, block: Any
) -> None:
    wrapped = WRAPPERS["Accelerate"](optimizer)
    ExponentialLR(wrapped, 0.5)
    with pytest.raises(gradserve.InvalidArgumentError, match="the optimizer has a learning rate scheduler"):
        block(client, model, wrapped, name=name, num_required=1)


def prepared(optimizer: Any) -> tuple[Any, Any]:
    accelerator = package("accelerate").Accelerator(cpu=True)
    stepped = accelerator.prepare(optimizer)
    return stepped, accelerator.prepare(ExponentialLR(stepped, 0.5))


def configured(optimizer: Any) -> tuple[Any, Any]:
    config = package("lightning.pytorch.utilities.types").LRSchedulerConfig(ExponentialLR(optimizer, 0.5))
    return optimizer, config


@pytest.mark.parametrize("block", [average_gradients, BLOCKS["DiLoCo"]], ids=["average_gradients", "DiLoCo"])
@pytest.mark.parametrize("wrap", [prepared, configured], ids=["Accelerate", "Lightning"])
def test_a_scheduler_in_a_wrapper(
    client: gradserve.Client, name: str, model: torch.nn.Module, optimizer: Any, wrap: Any, block: Any
) -> None:
    stepped, wrapped = wrap(optimizer)
    scheduler = wrapped if hasattr(wrapped, "step") else wrapped.scheduler
    with block(client, model, stepped, scheduler=wrapped, name=name, num_required=1) as run:
        for rate in (0.05, 0.025):
            model(torch.ones(3, 4)).sum().backward()
            stepped.step()
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == rate
        assert run.step == 2


def test_an_optimizer_of_keras_is_refused(client: gradserve.Client, name: str, model: torch.nn.Module) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=r"a torch\.optim\.Optimizer for optimizer, got SGD"):
        average_gradients(client, model, gradserve.optim.SGD(0.1), name=name, num_required=1)
