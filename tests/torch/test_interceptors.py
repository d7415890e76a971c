"""Interceptors act around the calls of the hooks for PyTorch, too, which are those of a client."""

from collections import Counter

import torch

import gradserve
import gradserve.torch
from gradserve.testing import InProcessServer


class Methods(gradserve.Interceptor):
    """Counts the calls on an accumulator by method."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()

    def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
        if call.name == self.name:
            self.counts[call.method.rpartition("/")[2]] += 1
        yield None


def test_each_step_is_a_call() -> None:
    methods = Methods("net")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        InProcessServer() as server,
        gradserve.connect(server.address, interceptors=[methods]) as client,
        gradserve.torch.average_gradients(client, model, optimizer, num_required=1, name="net"),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    assert methods.counts["PushPull"] == 3
