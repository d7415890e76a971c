"""PyTorch models whose parameters a server holds."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gradserve
from gradserve import optim
from gradserve.torch import delta_of, gradients_of, load_version, parameters_of
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.restarting import RestartingServer
from tests.torch.seeds import seeded

STEPS = 6
INNER_STEPS = 3


class Tied(torch.nn.Module):
    """A model with a parameter of two names, a frozen one, a buffer, and one that no forward uses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(4, 3, bias=False, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(3, dtype=dtype)
        self.head = torch.nn.Linear(4, 3, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embedding(inputs)) + self.head(inputs)


NAMES = ["unused", "embedding.weight", "norm.weight", "norm.bias", "head.bias"]


def tied(seed: int, dtype: torch.dtype = torch.float32) -> Tied:
    with seeded(seed):
        return Tied(dtype)


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * worker + step))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    for inner in range(INNER_STEPS):
        optimizer.zero_grad()
        model(batch(worker, 10 * step + inner)).square().mean().backward()
        optimizer.step()


def values_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: each.tolist() for name, each in parameters_of(model).items()}


def test_what_the_server_holds_of_a_model(client: gradserve.Client, name: str) -> None:
    model = tied(1)
    assert list(parameters_of(model)) == NAMES
    assert not any(each.requires_grad for each in parameters_of(model).values())
    version = client.parameters(parameters_of(model), shared_name=name).read()
    other = tied(2)
    buffers = {key: each.clone() for key, each in other.named_buffers()}
    load_version(other, version)
    assert values_of(other) == values_of(model)
    assert other.head.weight is other.embedding.weight
    assert all(torch.equal(each, buffers[key]) for key, each in other.named_buffers())


def test_workers_with_deltas_do_as_diloco_in_one_process(client: gradserve.Client, name: str) -> None:
    """Each takes steps of its own optimizer, whose state stays; an outer optimizer moves the common parameters."""

    def work(worker: int) -> tuple[dict[str, Any], str]:
        model = models[worker]
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        parameters = client.parameters(
            parameters_of(model),
            shared_name=name,
            num_required=2,
            optimizer=optim.SGD(0.7, momentum=0.9, nesterov=True),
        )
        version = parameters.read()
        while version.step < STEPS:
            load_version(model, version)
            train(model, inner, worker, version.step)
            update = delta_of(model, version)
            version = parameters.push_pull(update, version, worker_id=f"{worker}", timeout=PATIENCE_SECONDS).version
        load_version(model, version)
        return values_of(model), version.digest

    models = [tied(1), tied(2)]
    common = tied(1)
    client.parameters(
        parameters_of(common), shared_name=name, num_required=2, optimizer=optim.SGD(0.7, momentum=0.9, nesterov=True)
    )
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, range(2))
    assert first == second

    alone = [tied(1), tied(2)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in alone]
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    own = dict(common.named_parameters())
    for step in range(STEPS):
        for worker, model in enumerate(alone):
            with torch.no_grad():
                for key, each in model.named_parameters():
                    each.copy_(own[key])
            train(model, optimizers[worker], worker, step)
        locals_ = [parameters_of(each) for each in alone]
        for key in NAMES:
            own[key].grad = own[key].detach() - (locals_[0][key] + locals_[1][key]) / 2
        outer.step()
    for key, value in parameters_of(common).items():
        torch.testing.assert_close(torch.tensor(first[0][key]), value, rtol=1e-4, atol=1e-5)


def test_gradients_do_as_the_optimizer_of_pytorch(client: gradserve.Client, name: str) -> None:
    """A parameter without a gradient is skipped: weight decay leaves it alone."""
    model, alone = tied(1), tied(1)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1)
    parameters = client.parameters(
        parameters_of(model), shared_name=name, update="gradient", optimizer=optim.AdamW(0.01, weight_decay=0.1)
    )
    for step in range(STEPS):
        for each in (model, alone):
            each.zero_grad()
            each(batch(0, step)).square().mean().backward()
        assert list(gradients_of(model)) == NAMES[1:]
        load_version(model, parameters.push_pull(gradients_of(model), step).version)
        optimizer.step()
    for key, value in parameters_of(alone).items():
        torch.testing.assert_close(parameters_of(model)[key], value, rtol=1e-5, atol=1e-6)
    assert model.unused.tolist() == [1.0, 1.0]


def test_a_model_of_a_shorter_dtype_moves_by_what_it_learnt_alone(client: gradserve.Client, name: str) -> None:
    """Rounding to its dtype is no step: without training, its update is zero, and the server's bits stay."""
    parameters = client.parameters(parameters_of(tied(1)), shared_name=name)
    version = parameters.read()
    model = tied(2, torch.bfloat16)
    load_version(model, version)
    assert model.head.bias.dtype == torch.bfloat16
    assert all(not each.any() for each in delta_of(model, version).values())
    with torch.no_grad():
        model.unused += 0.5
    after = parameters.push_pull(delta_of(model, version), version).version
    assert after["unused"].tolist() == [1.5, 1.5]
    assert all(after[key].tolist() == version[key].tolist() for key in NAMES[1:])


def test_frozen_parameters_are_loaded_if_the_server_has_them_but_never_sent(
    client: gradserve.Client, name: str
) -> None:
    values = {key: each.detach() for key, each in tied(1).named_parameters(remove_duplicate=False)}
    version = client.parameters({**values, "frozen": torch.zeros(2)}, shared_name=name).read()
    assert {"frozen", "embedding.weight", "head.weight"} <= version.keys()
    model = tied(2)
    load_version(model, version)
    assert model.frozen.tolist() == [0.0, 0.0]
    assert list(delta_of(model, version)) == NAMES


def test_the_version_of_another_model(client: gradserve.Client, name: str) -> None:
    version = client.parameters({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, shared_name=name).read()
    for model, match in (
        (torch.nn.Linear(4, 2), r"expected shape \(2, 4\) of 'weight', got \(2, 3\)"),
        (torch.nn.Linear(3, 2, bias=False), "expected values of the model's parameters alone, got 'bias'"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2)), "expected values of '0.weight', '0.bias', got none, but 'weight'"),
    ):
        before = values_of(model)
        for use in (load_version, delta_of):
            with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
                use(model, version)
            assert raised.value.field == "version"
        assert values_of(model) == before


def test_a_worker_that_joins_late_or_comes_too_late_goes_on_from_the_newest_version(
    client: gradserve.Client, name: str
) -> None:
    models = [tied(seed) for seed in (1, 2)]
    first, late = (client.parameters(parameters_of(each), shared_name=name) for each in models)
    base = first.read()
    version = base
    for step in range(3):
        load_version(models[0], version)
        train(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1), 0, step)
        version = first.push_pull(delta_of(models[0], version), version).version
    assert late.read().digest == version.digest
    load_version(models[1], base)
    with torch.no_grad():
        models[1].unused += 100
    pulled = late.push_pull(delta_of(models[1], base), base)
    assert (pulled.outcome, pulled.version.digest) == (gradserve.STALE, version.digest)
    for model in models:
        load_version(model, pulled.version)
    assert values_of(models[1]) == values_of(models[0])


def test_a_worker_goes_on_after_the_server_has_lost_the_parameters() -> None:
    """With what it has; the state of the optimizer is gone. Tied parameters are one tensor as before."""
    model = tied(1)
    values = {key: each.detach() for key, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    with RestartingServer(None) as server, gradserve.connect(server.address) as client:
        parameters = client.parameters(values, shared_name="net")
        version = parameters.read()
        has_lost = False
        while version.step < 4:
            load_version(model, version)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, version.step)
            if version.step == 2 and not has_lost:
                server.restart()
            try:
                version = parameters.push_pull(delta_of(model, version), version).version
            except gradserve.LostError:
                parameters, has_lost = client.parameters(version, shared_name="net"), True
                version = parameters.read()
                assert version.step == 2
        assert has_lost
        assert list(parameters.info().components) == [key for key in version if key != "head.weight"]
