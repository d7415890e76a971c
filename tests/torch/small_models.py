"""Models of one or two weights, whose values say what was synchronized."""

from typing import Any

import torch

import gradserve
from gradserve.torch import LocalSGD


class TwoWeights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def values(self) -> list[float]:
        return [float(each.detach()) for each in self.parameters()]


class Walker:
    """A worker whose inner steps add a constant to its weight."""

    def __init__(
        self, client: gradserve.Client, name: str, speed: float, *, sync_every: int = 2, **options: Any
    ) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.speed = speed
        self.diloco = LocalSGD(client, self.model, self.inner, sync_every=sync_every, name=name, **options)

    @property
    def weight(self) -> float:
        return float(self.model.weight.detach())

    def walk(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.model.weight.grad = torch.full_like(self.model.weight, -self.speed)
            self.inner.step()
