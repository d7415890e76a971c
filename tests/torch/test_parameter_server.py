"""A server that takes the steps of an optimizer of PyTorch, with the gradients of workers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradserve
from gradserve import optim
from gradserve.torch import ParameterServer
from tests.torch.seeds import seeded
from tests.torch.training_threads import together

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def model_of(seed: int) -> torch.nn.Module:
    with seeded(seed):
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def backward(model: torch.nn.Module, worker: int, step: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * worker + step))
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_pytorch_on_the_mean(clients: list[gradserve.Client], name: str, kind: str) -> None:
    steps = 6

    def work(rank: int) -> torch.nn.Module:
        model = model_of(1)
        optimizer = OPTIMIZERS[kind](model.parameters())
        with ParameterServer(clients[rank], model, optimizer, name=name, num_required=2) as server:
            server.weight = 1.0 + rank
            for step in range(steps):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
            assert server.step == steps
        assert kind == "Adagrad" or not optimizer.state, "the server has the state"
        return model

    one, other = together(lambda: work(0), lambda: work(1))
    expected = model_of(1)
    optimizer = OPTIMIZERS[kind](expected.parameters())
    for step in range(steps):
        gradients: list[list[torch.Tensor]] = []
        for worker in range(2):
            optimizer.zero_grad()
            backward(expected, worker, step)
            gradients.append([each.grad.clone() for each in expected.parameters() if each.grad is not None])
        for parameter, first, second in zip(expected.parameters(), *gradients, strict=True):
            parameter.grad = (first + 2 * second) / 3
        optimizer.step()
    for own, others, right in zip(one.parameters(), other.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, others)
        torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-6)


def test_asynchronous_steps_wait_for_nobody(clients: list[gradserve.Client], name: str) -> None:
    """A slow worker's gradients count, for less; what is too old is dropped, and it goes on from the newest version."""
    workers = []
    for client in clients:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        server = ParameterServer(
            client, model, optimizer, name=name, num_required=1, asynchronous=True, max_staleness=2, normalize="count",
            staleness="inverse_sqrt",
        )  # fmt: skip
        workers.append((server, model, optimizer))

    def step(rank: int, gradient: float) -> float:
        _, model, optimizer = workers[rank]
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        return float(model.weight.detach())

    with workers[0][0] as fast, workers[1][0] as slow:
        assert [step(0, -1.0) for _ in range(2)] == [1.0, 2.0]
        assert step(1, -3.0) == pytest.approx(2.0 + 3.0 / 3**0.5)
        assert slow.step == 3
        newest = [step(0, -1.0) for _ in range(3)][-1]
        assert (step(1, -100.0), slow.step) == (newest, fast.step)


def test_a_worker_that_joins(clients: list[gradserve.Client], name: str) -> None:
    for client, seed, steps in zip(clients, (1, 2), ([1, 2, 3], [4, 5]), strict=True):
        model = model_of(seed)
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        schedule = optim.cosine(100)
        with ParameterServer(client, model, optimizer, name=name, num_required=1, schedule=schedule) as server:
            for step in steps:
                backward(model, 0, 0)
                optimizer.step()
                assert server.step == step


def bad(change: Callable[[torch.nn.Module, Any], Any]) -> Callable[[torch.nn.Module], Any]:
    def made(model: torch.nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return change(model, optimizer) or optimizer

    return made


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda _model: optim.SGD(0.1), "a torch.optim.Optimizer"),
        (lambda model: torch.optim.SGD([next(model.parameters())], lr=0.1), "all of them and no others"),
        (bad(lambda _model, given: torch.optim.lr_scheduler.StepLR(given, 1) and None), "pass schedule="),
        (lambda model: torch.optim.RMSprop(model.parameters()), "RMSprop"),
    ],
)
def test_optimizers_that_the_server_cannot_have(
    client: gradserve.Client, name: str, optimizer: Callable[[torch.nn.Module], Any], message: str
) -> None:
    model = model_of(1)
    with pytest.raises(gradserve.InvalidArgumentError, match=message) as failure:
        ParameterServer(client, model, optimizer(model), name=name, num_required=1)
    assert failure.value.field == "optimizer"


def test_a_closure_computes_the_gradients_of_a_step(client: gradserve.Client, name: str) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ParameterServer(client, model, optimizer, name=name, num_required=1) as server:
        before = model.weight.item()

        def closure() -> torch.Tensor:
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == before
        assert (server.step, model.weight.item()) == (1, pytest.approx(before - 0.5))
