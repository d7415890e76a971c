"""DiLoCo and LocalSGD: models that train by themselves and synchronize through parameters on a server."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradserve
from gradserve import optim
from gradserve.torch import DiLoCo, LocalSGD
from tests.servers.polling import eventually
from tests.torch.seeds import seeded
from tests.torch.small_models import TwoWeights, Walker
from tests.torch.training_threads import together

TORCHFT = json.loads(
    (Path(__file__).parent.parent / "parameters" / "data" / "torchft.json").read_text(encoding="utf-8")
)
SYNC_EVERY = 4


# torchft's own values


@pytest.mark.parametrize("by", ["number", "names", "modules"])
@pytest.mark.parametrize("case", TORCHFT["delays"], ids=lambda case: f"delay {case['delay']}, alpha {case['alpha']}")
def test_fragments_delays_and_mixing_as_in_torchft(
    clients: list[gradserve.Client], name: str, case: Any, by: str
) -> None:
    def replica(rank: int) -> list[list[float]]:
        model = TwoWeights()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        fragments = {"number": 2, "names": [["layers.0.weight"], ["layers.1.weight"]], "modules": list(model.layers)}
        diloco = DiLoCo(
            clients[rank],
            model,
            inner,
            sync_every=6,
            outer_optimizer=optim.SGD(2.0),
            name=name,
            num_required=2,
            fragments=fragments[by],  # type: ignore[arg-type]
            fragment_sync_delay=case["delay"],
            fragment_update_alpha=case["alpha"],
        )
        with diloco:
            history = [model.values()]
            for _ in case["replicas"][rank]["local"][1:]:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 2.0)
                inner.step()
                history.append(model.values())
        return history

    histories = together(*(partial(replica, rank) for rank in range(2)))
    assert histories == [each["local"] for each in case["replicas"]]


# Beside DiLoCo in one process


class Net(torch.nn.Module):
    """A model with tied weights, a buffer of floats and a counter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.embedding = torch.nn.Linear(4, 3, bias=False)
            self.norm = torch.nn.BatchNorm1d(3)
            self.head = torch.nn.Linear(4, 3)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.embedding(inputs)) + self.head(inputs)
        return result


def train(model: torch.nn.Module, inner: Any, worker: int, steps: range, size: int = 8) -> None:
    for step in steps:
        inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(1000 * worker + step))
        inner.zero_grad()
        model(inputs).square().mean().backward()
        inner.step()


def inner_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: each.detach().clone() for key, each in model.state_dict().items()}


def diloco_in_one_process(rounds: int, weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Workers one after the other, the exact mean of their changes, and PyTorch's Nesterov as printed."""
    models = [Net(1) for _ in weights]
    inner = [inner_of(each) for each in models]
    common = {key: each.detach().clone().numpy() for key, each in models[0].named_parameters()}
    momenta: dict[str, Any] = {}
    for number in range(rounds):
        for worker, model in enumerate(models):
            gradserve.torch.load_version(model, common)
            train(model, inner[worker], worker, range(number * SYNC_EVERY, (number + 1) * SYNC_EVERY))
        for key, value in common.items():
            deltas = [dict(each.named_parameters())[key].detach().numpy() - value for each in models]
            mean = sum(weight * each.astype(np.float64) for weight, each in zip(weights, deltas, strict=True))
            gradient = -np.float32(mean / sum(weights))
            momenta[key] = np.float32(0.9) * momenta[key] + gradient if key in momenta else gradient
            common[key] = value - np.float32(0.7) * (gradient + np.float32(0.9) * momenta[key])
    return {key: torch.from_numpy(each) for key, each in common.items()}


@pytest.mark.parametrize("deterministic", [False, True])
def test_it_is_diloco(server_address: str, name: str, deterministic: bool) -> None:
    rounds, weights = 20, [1.0, 2.0, 3.0, 4.0]

    def work(worker: int) -> dict[str, torch.Tensor]:
        model = Net(1 if worker == 0 else 10 + worker)
        inner = inner_of(model)
        with (
            gradserve.connect(server_address) as client,
            DiLoCo(
                client,
                model,
                inner,
                sync_every=SYNC_EVERY,
                name=name,
                num_required=4,
                weight=lambda _tokens, _steps: weights[worker],
                worker_id=str(worker),
                deterministic=deterministic,
            ) as diloco,
        ):
            train(model, inner, worker, range(rounds * SYNC_EVERY))
            assert (diloco.step, diloco.version) == (rounds * SYNC_EVERY, rounds)
        return state_of(model)

    with gradserve.connect(server_address) as client:  # the first one's values count
        client.parameters(
            gradserve.torch.parameters_of(Net(1)),
            shared_name=name,
            optimizer=optim.SGD(0.7, momentum=0.9, nesterov=True),
            num_required=4,
            deterministic=deterministic,
            agreement={"sync_every": str(SYNC_EVERY)},
        )
    states = together(*(partial(work, worker) for worker in range(4)))
    expected = diloco_in_one_process(rounds, weights)
    for key, value in expected.items():
        assert all(torch.equal(state[key], states[0][key]) for state in states)
        if deterministic:
            assert torch.equal(states[0][key], value)
        np.testing.assert_allclose(states[0][key], value, rtol=1e-6, atol=1e-6)


# A model whose every step is known: each adds `speed` to its only weight


def test_local_sgd_is_the_mean(clients: list[gradserve.Client], name: str) -> None:
    one, other = (Walker(each, name, speed, num_required=2) for each, speed in zip(clients, (1.0, 4.0), strict=True))

    def work(walker: Walker) -> float:
        with walker.diloco:
            walker.walk(6)
        return walker.weight

    assert together(lambda: work(one), lambda: work(other)) == [15.0, 15.0]


def test_weights(clients: list[gradserve.Client], name: str) -> None:
    def work(rank: int, speed: float, tokens: int) -> float:
        walker = Walker(clients[rank], name, speed, num_required=2, weight="tokens")
        with walker.diloco:
            for _ in range(2):
                walker.diloco.count(tokens=tokens)
                walker.walk(1)
        return walker.weight

    assert together(lambda: work(0, 1.0, 30), lambda: work(1, 5.0, 10)) == [4.0, 4.0]
    assert clients[0].parameters(shared_name=name).read().total_weight == 80


def test_metrics_are_the_means_of_all_steps(clients: list[gradserve.Client], name: str) -> None:
    def work(rank: int, losses: Sequence[float]) -> None:
        walker = Walker(clients[rank], name, 1.0, num_required=2, worker_id=str(rank), weight="equal")
        with walker.diloco as diloco:
            for loss in losses:
                diloco.report(loss=loss)
                walker.walk(1)

    together(lambda: work(0, [1.0, 3.0, 10.0, 20.0]), lambda: work(1, [5.0, 5.0, 0.0, 0.0]))
    first, second = clients[0].parameters(shared_name=name).rounds()
    assert {each.worker_id: each.metrics for each in first.updates} == {"0": {"loss": 2.0}, "1": {"loss": 5.0}}
    assert (first.metrics, second.metrics) == ({"loss": 3.5}, {"loss": 7.5})


def test_tokens_that_nobody_counted(clients: list[gradserve.Client], name: str) -> None:
    walker = Walker(clients[0], name, 1.0, num_required=1, weight="tokens")
    with walker.diloco, pytest.raises(gradserve.InvalidArgumentError, match=r"count\(tokens=...\)") as failure:
        walker.walk()
    assert failure.value.field == "weight"


def test_a_worker_that_joins_begins_with_the_newest_version(clients: list[gradserve.Client], name: str) -> None:
    first = Walker(clients[0], name, 1.0, num_required=1)
    with first.diloco:
        first.walk(7)
    joiner = Walker(clients[1], name, 100.0, num_required=1)
    with joiner.diloco as diloco:
        assert (joiner.weight, diloco.version, diloco.step) == (6.0, 3, 6)
        joiner.walk()
        assert (joiner.weight, diloco.version, diloco.step) == (206.0, 4, 8)


def test_the_schedule_of_a_worker_that_joins(clients: list[gradserve.Client], name: str) -> None:
    rates = []
    for client in clients:
        walker = Walker(client, name, 1.0, num_required=1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(walker.inner, [3, 5], gamma=0.1)
        diloco = LocalSGD(
            client, walker.model, walker.inner, sync_every=2, name=name, num_required=1, scheduler=schedule
        )
        with diloco:
            for _ in range(4):
                rates.append(walker.inner.param_groups[0]["lr"])
                walker.walk(1)
                schedule.step()
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_a_schedule_that_was_left_out(clients: list[gradserve.Client], name: str) -> None:
    walker = Walker(clients[0], name, 1.0, num_required=1)
    torch.optim.lr_scheduler.StepLR(walker.inner, 1)
    with pytest.raises(gradserve.InvalidArgumentError, match="which DiLoCo was not given"):
        DiLoCo(clients[0], walker.model, walker.inner, sync_every=2, name=name, num_required=1)


def test_training_goes_on_beside_a_synchronization(clients: list[gradserve.Client], name: str) -> None:
    def diloco(rank: int, speed: float) -> tuple[Walker, DiLoCo]:
        walker = Walker(clients[rank], name, speed, num_required=2)
        given = {"sync_every": 4, "outer_optimizer": optim.SGD(1.0), "name": name, "num_required": 2}
        delays = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
        return walker, DiLoCo(clients[rank], walker.model, walker.inner, **given, **delays)  # type: ignore[arg-type]

    (one, first), (other, second) = diloco(0, 1.0), diloco(1, 3.0)
    with first, second:
        one.walk(3)  # pushes after its second step, and does not wait
        assert one.weight == 3.0
        other.walk(4)
        one.walk(1)
    assert (one.weight, other.weight) == ((4.0 + 4.0) / 2, (12.0 + 4.0) / 2)


def test_the_end_of_a_block_waits_for_what_is_under_way(clients: list[gradserve.Client], name: str) -> None:
    walker = Walker(clients[0], name, 1.0, num_required=1)
    diloco = DiLoCo(
        clients[0], walker.model, walker.inner, sync_every=4, name=name, num_required=1, fragment_sync_delay=2
    )
    with diloco:
        walker.walk(3)
    assert clients[0].parameters(shared_name=name).info().step == 1


@pytest.mark.sampled
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "e3m0", "topk"])
def test_what_a_codec_leaves_out_comes_later(client: gradserve.Client, name: str, codec: str) -> None:
    """Every round moves by the same values, so what is not there in the end is less than some rounds have left out."""
    rounds = 200 if codec == "topk" else 10
    model = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.zeros_(model.weight)
    speed = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options: dict[str, Any] = {"codec": codec, "codec_down": "bf16"}
    with LocalSGD(client, model, inner, sync_every=1, name=name, num_required=1, **options):
        for _ in range(rounds):
            model.weight.grad = -speed
            inner.step()
    version = client.parameters(shared_name=name).read()
    left_out = torch.from_numpy(version["weight"]) / rounds - speed
    assert left_out.norm() < {"bf16": 0.005, "int8": 0.02, "topk": 0.5}.get(codec, 0.1) * speed.norm()
    assert 0 < (model.weight - torch.from_numpy(version["weight"])).norm() < 0.01 * model.weight.norm()


def test_a_last_synchronization(clients: list[gradserve.Client], name: str) -> None:
    walker = Walker(clients[0], name, 1.0, num_required=1)
    with walker.diloco as diloco:
        walker.walk(3)
        diloco.sync()
        assert diloco.version == 2
        diloco.sync()
        assert diloco.version == 2, "there was nothing to push"
    assert clients[1].parameters(shared_name=name).read()["weight"].item() == 3.0


def test_a_last_synchronization_with_one_under_way(clients: list[gradserve.Client], name: str) -> None:
    """The last update is the rest that mixing has left of the steps since the one that was under way."""
    walker = Walker(clients[0], name, 1.0, num_required=1)
    delays = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
    given = {"sync_every": 4, "outer_optimizer": optim.SGD(1.0), "name": name, "num_required": 1}
    with DiLoCo(clients[0], walker.model, walker.inner, **given, **delays) as diloco:  # type: ignore[arg-type]
        walker.walk(3)  # pushes after its second step
        diloco.sync()
        assert (walker.weight, diloco.version) == ((3.0 + 2.0) / 2, 2)
    assert clients[1].parameters(shared_name=name).read()["weight"].item() == walker.weight


def test_buffers(clients: list[gradserve.Client], name: str) -> None:
    """Floats become the weighted mean, counters the maximum; a worker that joins gets both."""

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = Net(1)
        inner = inner_of(model)
        diloco = LocalSGD(
            clients[rank], model, inner, sync_every=4, name=name, num_required=2, buffers="mean", weight="equal"
        )
        with diloco:
            train(model, inner, rank, range(3))
            for _ in range(10 * rank):
                model(torch.randn(4, 4))
            before[rank] = state_of(model)
            train(model, inner, rank, range(3, 4))
            alone[rank] = model.norm.running_mean.clone()
        return state_of(model)

    before: dict[int, dict[str, torch.Tensor]] = {}
    alone: dict[int, torch.Tensor] = {}
    one, other = together(lambda: work(0), lambda: work(1))
    assert one["norm.num_batches_tracked"] == other["norm.num_batches_tracked"] == 14
    assert torch.equal(one["norm.running_mean"], other["norm.running_mean"])
    assert torch.equal(one["norm.running_var"], other["norm.running_var"])
    assert not torch.equal(before[0]["norm.running_mean"], before[1]["norm.running_mean"])
    joiner = Net(5)
    with LocalSGD(
        clients[0], joiner, inner_of(joiner), sync_every=4, name=name, num_required=2, buffers="mean", weight="equal"
    ):
        assert all(torch.equal(each, one[key]) for key, each in joiner.state_dict().items())


def test_a_compiled_model_with_accumulated_and_scaled_gradients(client: gradserve.Client, name: str) -> None:
    model = Net(1)
    compiled: Any = torch.compile(model, backend="eager")
    inner = inner_of(model)
    scaler = torch.amp.GradScaler("cpu")
    with DiLoCo(client, compiled, inner, sync_every=2, name=name, num_required=1) as diloco:
        for _ in range(4):
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = compiled(torch.randn(8, 4)).square().mean()
                scaler.scale(loss).backward()
            scaler.step(inner)
            scaler.update()
            inner.zero_grad()
        assert (diloco.step, diloco.version) == (4, 2)
    version = client.parameters(shared_name=name).read()
    assert list(version) == ["embedding.weight", "norm.weight", "norm.bias", "head.bias"]
    assert all(np.array_equal(version[key], each.detach()) for key, each in model.named_parameters())


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        ({"sync_every": 0}, "sync_every", "an integer from 1"),
        ({"sync_every": 5, "fragments": 2}, "sync_every", "a multiple of the number of fragments, 2"),
        ({"sync_every": 2, "fragments": 4}, "sync_every", "a multiple of the number of fragments, 4"),
        ({"fragments": 9}, "fragments", "at most 4"),
        ({"fragments": [["head.bias"]]}, "fragments", "each parameter of the model in one fragment"),
        ({"fragments": "head.bias"}, "fragments", "lists of names or modules"),
        ({"fragment_sync_delay": 4}, "fragment_sync_delay", "from 0 to 3"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha", "a number from 0 to 1"),
        ({"weight": "size"}, "weight", "'tokens', 'steps', 'equal'"),
        ({"buffers": "max"}, "buffers", "'local' or 'mean'"),
        ({"codec": "int3"}, "codec", "a codec of gradserve.codecs"),
        ({"codec_down": "topk"}, "codec_down", "a codec for versions"),
        ({"on_failure": "stop"}, "on_failure", "'continue' or 'reset'"),
        ({"if_exists": "new"}, "if_exists", "'join' or 'error'"),
        ({"outer_optimizer": torch.optim.SGD}, "outer_optimizer", "an optimizer of gradserve.optim"),
        ({"inner_optimizer": None}, "inner_optimizer", "a torch.optim.Optimizer"),
        ({"num_required": 0}, "num_required", "1"),
    ],
)
def test_bad_arguments(client: gradserve.Client, name: str, wrong: Any, field: str, message: str) -> None:
    model = Net(1)
    given = {"inner_optimizer": inner_of(model), "sync_every": 4, "name": name, "num_required": 1} | wrong
    with pytest.raises(gradserve.InvalidArgumentError) as failure, DiLoCo(client, model, **given):
        pass
    assert failure.value.field == field
    assert message in failure.value.message


def test_workers_that_do_not_fit_together(clients: list[gradserve.Client], name: str) -> None:
    with Walker(clients[0], name, 1.0, num_required=1).diloco:
        pass
    for other in ({"sync_every": 3}, {"deterministic": True}):
        with pytest.raises(gradserve.AlreadyExistsError), Walker(clients[1], name, 1.0, num_required=1, **other).diloco:
            pass
    model = Net(1)
    with (
        pytest.raises(gradserve.AlreadyExistsError),
        LocalSGD(clients[1], model, inner_of(model), sync_every=2, name=name, num_required=1),
    ):
        pass


def test_a_run_that_exists(clients: list[gradserve.Client], name: str) -> None:
    with Walker(clients[0], name, 1.0, num_required=1).diloco:
        pass
    walker = Walker(clients[0], name, 1.0, num_required=1, if_exists="error")
    with walker.diloco:  # it has no versions yet
        walker.walk()
    with (
        pytest.raises(gradserve.AlreadyExistsError, match="has 1 versions already"),
        Walker(clients[1], name, 1.0, num_required=1, if_exists="error").diloco,
    ):
        pass


def test_another_outer_optimizer_is_logged(
    clients: list[gradserve.Client], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for client, rate in zip(clients, (0.7, 0.5), strict=True):
        model = Net(1)
        outer = optim.SGD(rate)
        with DiLoCo(client, model, inner_of(model), sync_every=2, outer_optimizer=outer, name=name, num_required=1):
            pass
    assert "has outer optimizer SGD(lr=0.7" in caplog.text


def test_a_run_that_is_deleted(clients: list[gradserve.Client], name: str) -> None:
    walker = Walker(clients[0], name, 1.0, num_required=2)

    def delete() -> None:
        parameters = clients[1].parameters(shared_name=name)
        eventually(lambda: parameters.info().num_updates == 1)
        parameters.delete()

    with walker.diloco, pytest.raises(gradserve.AbortedError):
        together(walker.walk, delete)
