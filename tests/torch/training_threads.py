"""Workers that average gradients in threads, each with a model, an optimizer and a client of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

import gradserve
from gradserve.torch import average_gradients
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.seeds import seeded

Optimizers = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def network(seed: int = 0) -> torch.nn.Module:
    with seeded(seed):
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))


class Training:
    """A worker that is training."""

    def __init__(self, address: str, name: str, optimizers: Optimizers = sgd, seed: int = 0, **options: Any) -> None:
        self.model = network(seed)
        self.optimizer = optimizers(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.client = gradserve.connect(address, timeout=PATIENCE_SECONDS)
        options = {"num_required": 1, "scheduler": self.scheduler} | options
        self.averaging = average_gradients(self.client, self.model, self.optimizer, name=name, **options)

    def __enter__(self) -> "Training":
        self.averaging.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.averaging.__exit__(*error)
        self.client.close()

    def step(self, scale: float = 1.0) -> int:
        self.optimizer.zero_grad()
        self.model(scale * torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        return self.averaging.step

    @property
    def everything(self) -> list[Any]:
        """All that has to be equal at equal steps: parameters, the optimizer's state, the learning rate."""
        remembered = self.optimizer.state_dict()["state"]
        return [
            [parameter.tolist() for parameter in self.model.parameters()],
            {
                key: {name: torch.as_tensor(each).tolist() for name, each in state.items()}
                for key, state in remembered.items()
            },
            self.optimizer.param_groups[0]["lr"],
            self.scheduler.last_epoch,
        ]


@contextmanager
def trainings(address: str, name: str, number: int, **options: Any) -> Iterator[list[Training]]:
    """Workers, each with other weights before it begins; the first one begins first."""
    made = [Training(address, name, seed=seed, worker_id=f"w{seed}", **options) for seed in range(number)]
    try:
        yield [each.__enter__() for each in made]
    finally:
        for each in made:
            each.averaging._worker.close()
            each.client.close()


def together(*workers: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(workers)) as threads:
        return [each.result() for each in [threads.submit(worker) for worker in workers]]
