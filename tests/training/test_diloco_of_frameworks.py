"""Workers in PyTorch, JAX and NumPy train one model by DiLoCo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import optim
from tests.servers.polling import PATIENCE_SECONDS

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make install-frameworks")
pytest.importorskip("optax", reason="JAX is not installed: make install-frameworks")

TARGET = {"w": [3.0, -1.0], "b": [0.5]}
RATE = 0.1
SYNC_EVERY, ROUNDS = 4, 5


def by_torch(client: gradserve.Client, name: str) -> dict[str, Any]:
    from gradserve.torch import LocalSGD

    class Model(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2))
            self.b = torch.nn.Parameter(torch.zeros(1))

    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    with LocalSGD(client, model, inner, sync_every=SYNC_EVERY, name=name, num_required=3):
        for _ in range(ROUNDS * SYNC_EVERY):
            for key, each in model.named_parameters():
                each.grad = each.detach() - torch.tensor(TARGET[key])
            inner.step()
    return {key: each.detach().numpy() for key, each in model.named_parameters()}


def by_jax(client: gradserve.Client, name: str) -> dict[str, Any]:
    import jax.numpy as jnp

    from gradserve.jax import diloco

    with diloco(client, sync_every=SYNC_EVERY, outer=optim.SGD(1.0), name=name, num_required=3) as run:
        params = run.init({"w": jnp.zeros(2), "b": jnp.zeros(1)})
        for _ in range(ROUNDS * SYNC_EVERY):
            params = run.sync({key: each - RATE * (each - jnp.array(TARGET[key])) for key, each in params.items()})
    return {key: np.asarray(each) for key, each in params.items()}


def by_numpy(client: gradserve.Client, name: str) -> dict[str, Any]:
    """The loop that docs/howto/outer_averaging.md has."""
    parameters = client.parameters(
        {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)},
        shared_name=name,
        num_required=3,
        agreement={"sync_every": str(SYNC_EVERY)},
    )
    version = parameters.read()
    while version.step < ROUNDS:
        local = {key: each.copy() for key, each in version.items()}
        for _ in range(SYNC_EVERY):
            for key in local:
                local[key] -= np.float32(RATE) * (local[key] - np.array(TARGET[key], np.float32))
        version = parameters.push_pull({key: local[key] - version[key] for key in local}, version).version
    return dict(version)


def test_workers_of_three_frameworks(server_address: str, name: str) -> None:
    def work(by: Callable[[gradserve.Client, str], dict[str, Any]]) -> dict[str, Any]:
        with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client:
            return by(client, name)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, [by_torch, by_jax, by_numpy]))
    for key, target in TARGET.items():
        assert all(np.array_equal(each[key], found[0][key]) for each in found)
        np.testing.assert_allclose(
            found[0][key], (1 - (1 - RATE) ** (ROUNDS * SYNC_EVERY)) * np.array(target), rtol=1e-4
        )
