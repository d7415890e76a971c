"""The hook of FSDP2, in `fully_shard` on the CPU over a mesh of one process; each replica is a model of its own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradserve
from gradserve.torch import all_reduce_hook, comm_hook

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def mesh(process_group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def replica(
    client: gradserve.Client, name: str, num_required: int, mesh: DeviceMesh, **options: Any
) -> torch.nn.Module:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            hook = all_reduce_hook(client, num_required=num_required, name=f"{name}/{path}/0", worker_id=str(id(model)))
            module.set_all_reduce_hook(hook)
    return model


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in found if each is not None]


def backward(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return gradients(model)


def test_replicas_get_the_averages(client: gradserve.Client, name: str, mesh: DeviceMesh) -> None:
    inputs = [torch.full((2, 4), float(scale)) for scale in (1, 2)]
    expected = [torch.stack(each).mean(0) for each in zip(*(backward(network(), x) for x in inputs), strict=True)]
    replicas = [replica(client, name, 2, mesh) for _ in inputs]
    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(backward, replicas, inputs))
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)  # sums of two, rounded once


def test_gradients_reduced_in_another_dtype(client: gradserve.Client, name: str, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = network()
    for layer in (plain[0], plain[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    expected = backward(fully_shard(plain, mesh=mesh, mp_policy=policy), torch.ones(2, 4))
    averaged = backward(replica(client, name, 1, mesh, mp_policy=policy), torch.ones(2, 4))
    torch.testing.assert_close(averaged, expected, rtol=0, atol=0)  # the average of one is itself


def test_a_late_replica_gets_the_averages_that_it_missed(client: gradserve.Client, name: str, mesh: DeviceMesh) -> None:
    early, late = (replica(client, name, 1, mesh) for _ in range(2))
    missed = [backward(early, torch.full((2, 4), float(scale))) for scale in (1, 2)]
    for expected in missed:
        torch.testing.assert_close(backward(late, torch.zeros(2, 4)), expected, rtol=0, atol=0)


class TestMistakes:
    def test_a_sharded_model_elsewhere(self, client: gradserve.Client, name: str, mesh: DeviceMesh) -> None:
        model = fully_shard(network(), mesh=mesh)
        with pytest.raises(gradserve.InvalidArgumentError, match="'0.weight' is sharded .* with all_reduce_hook"):
            comm_hook(client, model, num_required=1, name=name)

    def test_another_model(self, client: gradserve.Client, name: str) -> None:
        all_reduce_hook(client, num_required=1, name=name)(torch.ones(4))
        with pytest.raises(gradserve.AlreadyExistsError, match="need the same model"):
            all_reduce_hook(client, num_required=1, name=name)(torch.ones(5))

    def test_some_parameters_without_a_gradient(self, client: gradserve.Client, name: str) -> None:
        hook = all_reduce_hook(client, num_required=1, name=name)
        hook(torch.ones(4))
        with pytest.raises(gradserve.InvalidArgumentError, match=r"set_reduce_scatter_unused_params\(True\)"):
            hook(torch.ones(3))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([1.0], "the output of a reduce-scatter, a plain dense tensor, got list"),
            (torch.ones(3).to_sparse(), "a plain dense tensor"),
            (torch.nn.Parameter(torch.ones(3)), "a plain dense tensor, got Parameter"),
            (torch.ones(3, dtype=torch.int32), "int32"),
        ],
    )
    def test_what_is_no_gradient(self, client: gradserve.Client, name: str, given: Any, message: str) -> None:
        with pytest.raises(gradserve.InvalidArgumentError, match=message):
            all_reduce_hook(client, num_required=1, name=name)(given)

    def test_its_errors_reach_the_backward_pass(self, client: gradserve.Client, name: str, mesh: DeviceMesh) -> None:
        model = fully_shard(network(), mesh=mesh)
        model.set_all_reduce_hook(all_reduce_hook(client, num_required=2, name=name, worker_id="w0", timeout=0.05))
        with pytest.raises(gradserve.DeadlineExceededError, match=r"1 gradient is in \(workers: w0"):
            model(torch.ones(2, 4)).sum().backward()


def test_gradients_that_are_not_finite(client: gradserve.Client, name: str) -> None:
    for refuses in (True, False):
        hook = all_reduce_hook(client, num_required=1, name=f"{name}/{refuses}", refuse_non_finite=refuses)
        gradients = torch.tensor([1.0, torch.inf])
        if refuses:
            with pytest.raises(gradserve.InvalidArgumentError, match=r"got inf at \[1\]"):
                hook(gradients)
        else:
            hook(gradients)
        assert gradients.tolist() == [1.0, torch.inf]


def test_a_run_that_there_is_already(client: gradserve.Client, name: str) -> None:
    all_reduce_hook(client, num_required=1, name=name)(torch.ones(2))
    with pytest.raises(gradserve.AlreadyExistsError, match="is at step 1, .* begins at step 0"):
        all_reduce_hook(client, num_required=1, name=name, if_exists="error")(torch.ones(2))
