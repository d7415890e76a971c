"""Two workers with one worker_id are told, in every integration: one of them would wait in vain."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.training import Worker
from tests.servers.polling import PATIENCE_SECONDS, eventually

Step = Callable[[], object]


def own_loop(client: gradserve.Client, name: str) -> Step:
    worker = Worker(client, {"w": np.zeros(2, np.float32)}, name=name, num_required=2, worker_id="w0")
    worker.begin(lambda: None, start_step=0)
    return lambda: worker.exchange({"w": np.ones(2, np.float32)})


def average_gradients(client: gradserve.Client, name: str) -> Step:
    torch = pytest.importorskip("torch")
    from gradserve.torch import average_gradients

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    averaging = average_gradients(client, model, optimizer, num_required=2, name=name, worker_id="w0")
    averaging.__enter__()

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return step


def average_by(client: gradserve.Client, name: str) -> Step:
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from tests.jax.runs import JaxWorker

    worker = JaxWorker(client, name, num_required=2, worker_id="w0").begin()
    return lambda: worker.update(0)


@pytest.mark.parametrize(
    "begin",
    [own_loop, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (average_gradients, average_by))],
    ids=lambda each: each.__name__,
)
def test_the_second_is_told(server_address: str, name: str, begin: Callable[[gradserve.Client, str], Any]) -> None:
    with (
        gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as second,
        ThreadPoolExecutor(1) as threads,
        gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as first,
    ):
        one, two = begin(first, name), begin(second, name)
        waiting = threads.submit(one)
        eventually(lambda: [each.num_waiting for each in second.list_accumulators() if each.name == name] == [1])
        with pytest.raises(Exception, match="two clients use worker_id 'w0' at once"):
            two()
        assert not waiting.done()
