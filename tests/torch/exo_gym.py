"""A training that exo gym and gradserve take alike: a small model, the data of each worker, and the configurations."""

from typing import Any

import torch

NUM_WORKERS, NUM_STEPS, BATCH = 3, 20, 8
SYNC_EVERY = 4
"""Which exo gym calls H. It synchronizes after H + 1 steps at first, and then after each H."""
CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.01, "max_norm": None, "outer_lr": 0.7, "warmup": None},
    "as in its example": {"lr": 0.02, "max_norm": 0.5, "outer_lr": 0.7, "warmup": 3},
    "another outer rate": {"lr": 0.01, "max_norm": None, "outer_lr": 0.4, "warmup": None},
}
"""Settings of the inner AdamW, with a cosine schedule if `warmup` is a number of steps, and of the outer SGD."""


def make_model() -> torch.nn.Sequential:
    """Returns the model, with the same weights each time, whatever the release of PyTorch."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(_waves(parameter.shape, 3.0 + number) / 2)
    return model


def loss_of(model: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
    """Returns the loss of a worker's batch; workers have different targets."""
    inputs = _waves(torch.Size([BATCH, 4]), 10.0 + NUM_WORKERS * step + worker)
    targets = torch.stack([inputs.sum(1), inputs[:, 0] * (worker + 1)], 1)
    result: torch.Tensor = (model(inputs) - targets).square().mean()
    return result


def _waves(shape: torch.Size, phase: float) -> torch.Tensor:
    return torch.sin(phase * (1.0 + torch.arange(shape.numel(), dtype=torch.float64))).reshape(shape)
