"""Equal weights for all workers at the start."""

import pytest
import torch

import gradserve
from gradserve.torch import broadcast_parameters


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1, dtype=torch.bfloat16)
    )
    model[1].running_mean.fill_(seed)
    return model


def test_all_get_the_weights_of_the_first(client: gradserve.Client, name: str) -> None:
    models = [network(seed) for seed in (1, 2, 3)]
    assert [broadcast_parameters(client, model, name=name) for model in models] == [False, True, True]
    for model in models:
        state = model.state_dict()
        assert all(torch.equal(each, state[key]) for key, each in network(1).state_dict().items())
        assert state["1.num_batches_tracked"].dtype is torch.int64


def test_with_the_state_of_the_optimizer(client: gradserve.Client, name: str) -> None:
    models = [torch.nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        broadcast_parameters(client, model, optimizer, name=name)
    first, second = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert {key: each.tolist() for key, each in first.items()} == {key: each.tolist() for key, each in second.items()}


def test_another_model(client: gradserve.Client, name: str) -> None:
    broadcast_parameters(client, torch.nn.Linear(4, 2), name=name)
    with pytest.raises(gradserve.AlreadyExistsError) as raised:
        broadcast_parameters(client, torch.nn.Linear(4, 3), name=name)
    assert any("need the same parameters" in note for note in raised.value.__notes__)
