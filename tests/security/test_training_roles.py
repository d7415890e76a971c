"""Training runs with an access file: a chief begins one, workers join it, leave it and answer newcomers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.testing import ServerProcess
from gradserve_server.config import ListenConfig, RuntimeConfig, SecurityConfig, ServerConfig
from gradserve_server.config.servers import UpstreamConfig
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS, all_entries
from tests.servers.polling import PATIENCE_SECONDS
from tests.training.replicas import Replica, training

TEAM = "team"


@pytest.fixture(scope="module", params=["directly", "an aggregator"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    access = tmp_path_factory.mktemp("access") / "access.toml"
    access.write_text(all_entries())
    parts: dict[str, Any] = {
        "runtime": RuntimeConfig(device="cpu", warm_up=False),
        "security": SecurityConfig(access=str(access)),
        "listen": ListenConfig(),
    }
    with ExitStack() as stack:
        top = stack.enter_context(LocalServer(ServerConfig(**parts)))
        if request.param == "directly":
            yield top.address
            return
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("GRADSERVE_TOKEN", TOKENS["chief"])
        upstream = UpstreamConfig(upstream=top.address, upstream_workers=1)
        yield stack.enter_context(LocalServer(ServerConfig(**parts, upstream=upstream))).address


@contextmanager
def client_of(address: str, name: str) -> Iterator[gradserve.Client]:
    with gradserve.connect(address, token=TOKENS[name], timeout=PATIENCE_SECONDS) as client:
        yield client


Train = Callable[[gradserve.Client, str, str], int]
"""Takes one step of a run as a worker of this id, and leaves; returns the step after it."""


def own_loop(client: gradserve.Client, name: str, worker_id: str) -> int:
    with Replica(client, name, worker_id, 1, container=TEAM) as replica:
        replica.begin()
        replica.train()
        return replica.step


def average_gradients(client: gradserve.Client, name: str, worker_id: str) -> int:
    torch = pytest.importorskip("torch")
    from gradserve.torch import average_gradients

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    how: dict[str, Any] = {"num_required": 1, "name": name, "worker_id": worker_id, "container": TEAM}
    with average_gradients(client, model, optimizer, **how) as averaging:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return averaging.step


def average_by(client: gradserve.Client, name: str, worker_id: str) -> int:
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from tests.jax.runs import JaxWorker

    worker = JaxWorker(client, name, worker_id=worker_id, container=TEAM)
    step = sum(each.global_step for each in client.list_accumulators(TEAM) if each.name == name)
    if step:  # from a checkpoint
        worker.opt_state = (worker.opt_state[0]._replace(step=step), *worker.opt_state[1:])
    with worker.averaging:
        return worker.begin().update(0).at[0]


def broadcast(client: gradserve.Client, name: str, _worker_id: str) -> int:
    torch = pytest.importorskip("torch")
    from gradserve.torch import broadcast_parameters

    return 1 + broadcast_parameters(client, torch.nn.Linear(2, 1), name=name, container=TEAM)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "train",
    [
        own_loop,
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (average_gradients, average_by, broadcast)),
    ],
    ids=lambda each: each.__name__,
)
def test_workers_take_part_in_the_run_of_a_chief(address: str, name: str, train: Train) -> None:
    with client_of(address, "worker") as worker, pytest.raises(gradserve.PermissionDeniedError):
        train(worker, name, "too early")
    for step, who in enumerate(("chief", "worker", "colleague"), start=1):
        with client_of(address, who) as client:
            assert train(client, name, who) == (step if train is not broadcast else min(step, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("hook", ["comm_hook", "all_reduce_hook"])
def test_hooks(address: str, name: str, hook: str) -> None:
    torch = pytest.importorskip("torch")
    import gradserve.torch

    for who in ("chief", "worker"):
        with client_of(address, who) as client:
            how: dict[str, Any] = {"num_required": 1, "name": name, "container": TEAM, "worker_id": who}
            if hook == "comm_hook":
                gradserve.torch.comm_hook(client, torch.nn.Linear(2, 1), **how)
            else:
                gradserve.torch.all_reduce_hook(client, **how, step=int(who == "worker"))(torch.ones(3))
            assert {each.container for each in client.list_accumulators(TEAM)} == {TEAM}


def test_a_worker_answers_a_newcomer(address: str, name: str) -> None:
    how: dict[str, Any] = {"container": TEAM, "keep_averages": 1000}
    with client_of(address, "chief") as client:
        Replica(client, name, "chief", 1, **how)
    with (
        client_of(address, "worker") as one,
        client_of(address, "colleague") as other,
        Replica(one, name, "worker", 1, **how) as first,
        Replica(other, name, "colleague", 1, **how) as second,
        ThreadPoolExecutor(1) as threads,
    ):
        first.begin()
        first.train()
        joining = threads.submit(second.begin)
        while not joining.done():
            first.train()
        joining.result()
        assert second.num_loaded == 1


def test_what_a_worker_still_may_not(address: str, name: str) -> None:
    parameters = {"w": np.zeros(2, np.float32)}
    with client_of(address, "chief") as chief, client_of(address, "worker") as worker:
        model = chief.gradient_accumulator(parameters, name, container=TEAM)
        incarnation = model.info().incarnation
        own = worker.gradient_accumulator(parameters, f"{name}/{incarnation}/mine", container=TEAM)
        own.apply_grad(parameters, worker_id="w")
        assert own.take_grad(1).num_gradients == 1
        for other in (
            f"{name}/mine",
            f"{name}/{incarnation}",
            f"{name}/{'0' * len(incarnation)}/mine",
            f"/{incarnation}/x",
        ):
            with pytest.raises(gradserve.PermissionDeniedError, match="CreateAccumulator"):
                worker.gradient_accumulator(parameters, other, container=TEAM)
        opened = worker.gradient_accumulator(parameters, name, container=TEAM)
        opened.apply_grad(parameters, worker_id="w")
        with pytest.raises(gradserve.PermissionDeniedError, match="TakeGradient"):
            opened.take_grad(1)
        with pytest.raises(gradserve.PermissionDeniedError, match="SetGlobalStep"):
            own.set_global_step(3)


def test_a_restart_that_loses_the_run(tmp_path: Path, name: str) -> None:
    """A chief begins it again; a worker is told that it may not, and joins when it is started again."""
    access = tmp_path / "access.toml"
    access.write_text(all_entries())
    with ServerProcess(tmp_path, "--warm-up", "false", "--access", str(access)) as server, ExitStack() as stack:
        boss, helper = (stack.enter_context(client_of(server.address, each)) for each in ("chief", "worker"))
        chief = stack.enter_context(Replica(boss, name, "a", 1, container=TEAM).begin())
        worker = Replica(helper, name, "b", 1, container=TEAM).begin()
        chief.train()
        server.kill()
        server.restart()
        with pytest.raises(gradserve.PermissionDeniedError, match="needs the role chief"):
            worker.train()
        worker.worker.close()
        chief.train()
        with training(chief), Replica(helper, name, "b", 1, container=TEAM) as again:
            again.begin()
            assert again.step >= 2
