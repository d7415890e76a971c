"""The communication hook of DistributedDataParallel; each worker is a thread with a replica of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradserve
from gradserve.testing import ServerThread
from gradserve.torch import backward_pass, comm_hook
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.seeds import seeded

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is a group of its own."""
    monkeypatch.setattr(backward_pass, "_LEAST_BYTES", 1)
    monkeypatch.setattr(backward_pass, "_MOST_GROUPS", 1 << 20)


def network(seed: int = 0) -> torch.nn.Module:
    with seeded(seed):
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3), torch.nn.Linear(3, 1))


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))


_OF_THE_REPLICA = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view")


def _value(gradient: torch.Tensor | None) -> float | None:
    return None if gradient is None else gradient.item()


def _share(used: tuple[str, str], part: str) -> float | None:
    """Returns the mean of gradients of 1 by the workers that have used a part; None if nobody has."""
    number = sum(part in each for each in used)
    return number / 2 if number else None


def replica_of(
    client: gradserve.Client, model: torch.nn.Module, name: str, num_required: int = 1, **options: Any
) -> DistributedDataParallel:
    buckets = {key: options.pop(key) for key in list(options) if key in _OF_THE_REPLICA}
    replica = DistributedDataParallel(model, **buckets)
    replica.register_comm_hook(None, comm_hook(client, replica, num_required=num_required, name=name, **options))
    return replica


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def backward(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return gradients(model)


def together(*workers: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(workers)) as threads:
        return [each.result() for each in [threads.submit(worker) for worker in workers]]


@pytest.mark.usefixtures("_small_groups")
def test_averages_whatever_the_buckets(client: gradserve.Client, name: str) -> None:
    inputs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    expected = [torch.stack(each).mean(0) for each in zip(*(backward(network(), x) for x in inputs), strict=True)]
    sizes = [25, 0.00005, 0.0001]  # MiB: one bucket; one for each parameter; a few
    replicas = [replica_of(client, network(), name, 3, bucket_cap_mb=size) for size in sizes]
    for _ in range(3):  # buckets are made again after the first pass
        results = together(*(lambda r=r, x=x: backward(r, x) for r, x in zip(replicas, inputs, strict=True)))
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)  # sums of three, in any order
        assert all(torch.equal(*both) for both in zip(results[0], results[1], strict=True))


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dtypes_and_strides(
    client: gradserve.Client, name: str, as_view: bool, memory_format: torch.memory_format
) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Conv2d(3, 4, 2).bfloat16())
        layers[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
        return layers.to(memory_format=memory_format)

    x = torch.randn(2, 2, 5, 5).to(memory_format=memory_format)
    expected = backward(model(), x)
    replica = DistributedDataParallel(model(), gradient_as_bucket_view=as_view)
    replica.register_comm_hook(None, comm_hook(client, replica, num_required=1, name=name))
    for _ in range(2):
        torch.testing.assert_close(backward(replica, x), expected, rtol=0, atol=0)  # the average of one is itself


def test_gradients_of_several_passes_are_averaged_once(client: gradserve.Client, name: str) -> None:
    x, model = torch.randn(5, 4), network()
    expected = [3 * each for each in backward(network(), x)]
    replica = replica_of(client, model, name)
    with replica.no_sync():
        replica(x).sum().backward()
        replica(x).sum().backward()
    assert gradient_step(client, name) == 0
    replica(x).sum().backward()
    assert gradient_step(client, name) == 1
    torch.testing.assert_close(gradients(replica), expected)


def gradient_step(client: gradserve.Client, name: str, group: int = 0) -> int:
    (info,) = [each for each in client.list_accumulators() if each.name == f"{name}/gradients-{group}"]
    return info.global_step


@pytest.mark.usefixtures("_small_groups")
def test_a_group_is_averaged_while_the_pass_goes_on(client: gradserve.Client, name: str) -> None:
    class Observed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            last_layer = client.gradient_accumulator(
                {name: gradserve.DenseSpec("float32", (1,)) for name in ("2.bias", "gradserve/present")},
                shared_name=f"{name}/gradients-0",
                keep_averages=4,
                idle_lease=24 * 3600.0,
                refuse_non_finite=True,
                agreement={"num_required": "1"},
            )
            if len(passes) > 1:
                seen.append(last_layer.read_average(2, timeout=PATIENCE_SECONDS)["2.bias"].tolist())
            return gradient

    class Middle(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = Observed.apply(x)
            return result

    seen: list[list[float]] = []
    passes: list[int] = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), Middle(), torch.nn.Linear(3, 1))
    replica = replica_of(client, model, name, bucket_cap_mb=0.00001)
    for batch in (1, 2):  # in the first pass, there is only one bucket
        passes.append(batch)
        backward(replica, torch.ones(batch, 4))
    assert seen == [[2.0]]


class TestLateWorkers:
    def test_a_late_worker_gets_the_averages_that_it_missed(self, client: gradserve.Client, name: str) -> None:
        x, other_x = torch.ones(2, 4), torch.full((2, 4), 2.0)
        early, late = (replica_of(client, network(), name) for _ in range(2))
        missed = [backward(early, scale * x) for scale in (1, 2, 3)]
        for expected in missed:
            torch.testing.assert_close(backward(late, other_x), expected, rtol=0, atol=0)
        own = backward(network(), other_x)
        torch.testing.assert_close(backward(late, other_x), own, rtol=0, atol=0)  # the late one's own round

    def test_too_late(self, client: gradserve.Client, name: str) -> None:
        early = replica_of(client, network(), name, keep_averages=2)
        late = replica_of(client, network(), name, worker_id="late", keep_averages=2)
        for _ in range(3):
            backward(early, torch.ones(2, 4))
        with pytest.raises(gradserve.StaleGradientError, match="worker 'late' is at step 0, .* is at step 3") as raised:
            backward(late, torch.ones(2, 4))
        assert raised.value.global_step == 3
        with pytest.raises(gradserve.AbortedError, match="cannot go on after an error.*another hook.*is at step 3"):
            backward(late, torch.ones(2, 4))

    def test_a_run_is_continued_at_its_step(self, client: gradserve.Client, name: str) -> None:
        replica = DistributedDataParallel(network())
        first = comm_hook(client, replica, num_required=1, name=name)
        replica.register_comm_hook(None, first)
        for _ in range(6):
            backward(replica, torch.ones(2, 4))
        assert first.step == 6
        again = replica_of(client, network(), name, step=first.step)
        own = backward(network(), torch.full((2, 4), 2.0))
        torch.testing.assert_close(backward(again, torch.full((2, 4), 2.0)), own, rtol=0, atol=0)


class TestMistakes:
    def test_workers_that_are_missing(self, client: gradserve.Client, name: str) -> None:
        replica = replica_of(client, network(), name, 2, worker_id="w0", timeout=0.05)
        with pytest.raises(gradserve.DeadlineExceededError, match=r"1 gradient is in \(workers: w0") as few:
            backward(replica, torch.ones(2, 4))
        assert "request_id" not in str(few.value)

    def test_an_error_of_the_server(self, name: str) -> None:
        with ServerThread() as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
            replica = replica_of(client, network(), name, worker_id="w0")
            server.faults.fail_at("w0", step=1)
            backward(replica, torch.ones(2, 4))
            with pytest.raises(gradserve.InternalError, match="fail_at"):
                backward(replica, torch.ones(2, 4))

    @pytest.mark.usefixtures("_small_groups")
    def test_another_model(self, client: gradserve.Client, name: str) -> None:
        comm_hook(client, network(), num_required=2, name=name)
        other = torch.nn.Sequential(*list(network())[:3], torch.nn.Linear(3, 2))
        with pytest.raises(
            gradserve.AlreadyExistsError, match=r"same model, .* 3\.(weight|bias)|3\.(weight|bias).* same model"
        ):
            comm_hook(client, other, num_required=2, name=name)
        with pytest.raises(gradserve.AlreadyExistsError, match="same model"):
            comm_hook(client, torch.nn.Sequential(*list(network())[:3]), num_required=2, name=name)

    def test_another_number_of_workers(self, client: gradserve.Client, name: str) -> None:
        comm_hook(client, network(), num_required=2, name=name)
        with pytest.raises(gradserve.AlreadyExistsError, match="num_required.* same num_required"):
            comm_hook(client, network(), num_required=3, name=name)

    @pytest.mark.usefixtures("_small_groups")
    def test_parameters_without_a_gradient(self, client: gradserve.Client, name: str) -> None:
        class Half(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.unused, self.used = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = (self.unused(x) if uses_all else 0) + self.used(x)
                return result

        uses_all = True
        replica = replica_of(client, Half(), name, bucket_cap_mb=0.00001)
        backward(replica, torch.ones(2, 4))  # in whose order gradients come from now on: those of `used` first
        uses_all = False
        with pytest.raises(
            gradserve.InvalidArgumentError,
            match=r"no gradient for 2 .*: 'unused.bias', 'unused.weight'\. .*requires_grad=False",
        ):
            backward(replica, torch.ones(2, 4))
        zeros = replica_of(client, Half(), f"{name}-zeros", find_unused_parameters=True)
        backward(zeros, torch.ones(2, 4))

    def test_gradients_that_are_not_finite(self, client: gradserve.Client, name: str) -> None:
        replica = replica_of(client, network(), name)
        with pytest.raises(gradserve.InvalidArgumentError, match="expected finite values for component") as raised:
            backward(replica, torch.full((2, 4), torch.nan))
        assert "GradScaler" in raised.value.__notes__[0]
        replica = replica_of(client, network(), f"{name}-let-through", refuse_non_finite=False, container="other")
        backward(replica, torch.full((2, 4), torch.nan))
        kept = [each.idle_lease for each in client.list_accumulators("other") if each.name.startswith(name)]
        assert kept
        assert set(kept) == {24 * 3600.0}

    @pytest.mark.parametrize("as_view", [False, True])
    def test_parameters_that_some_workers_did_not_use(self, client: gradserve.Client, name: str, as_view: bool) -> None:
        class Parts(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.c = (torch.nn.Linear(1, 1, bias=False) for _ in range(3))

            def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
                return torch.stack([self.get_submodule(part)(x) for part in used]).sum()

        options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
        replicas = [replica_of(client, Parts(), name, num_required=2, **options) for _ in range(2)]

        def step(replica: DistributedDataParallel, used: str) -> dict[str, float | None]:
            replica.zero_grad()
            replica(torch.ones(1, 1), used).backward()
            return {part: _value(replica.module.get_submodule(part).weight.grad) for part in "abc"}

        for used in (("a", "ab"), ("ab", "b")):
            mine, theirs = together(*(partial(step, *each) for each in zip(replicas, used, strict=True)))
            assert mine == theirs
            assert mine == {part: _share(used, part) for part in "abc"}

    @pytest.mark.usefixtures("_small_groups")
    def test_a_pass_that_was_interrupted(self, client: gradserve.Client, name: str) -> None:
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                if failing:
                    raise KeyError("interrupted")
                return gradient

        class Middle(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = Fails.apply(x)
                return result

        failing: list[bool] = []
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), Middle(), torch.nn.Linear(3, 1))
        replica = replica_of(client, model, name, bucket_cap_mb=0.00001)
        backward(replica, torch.ones(2, 4))
        failing.append(True)
        with pytest.raises(KeyError, match="interrupted"):
            backward(replica, torch.ones(2, 4))
        failing.clear()
        hook = replica._comm_hooks[0][0]
        del replica  # which refuses to go on after such a pass
        again = DistributedDataParallel(model, bucket_cap_mb=0.00001)
        again.register_comm_hook(None, hook)
        with pytest.raises(gradserve.AbortedError, match="before all gradients were computed"):
            backward(again, torch.ones(2, 4))

    def test_sparse_gradients(self, client: gradserve.Client, name: str) -> None:
        replica = replica_of(client, torch.nn.Embedding(5, 3, sparse=True), name)
        with pytest.raises(
            gradserve.InvalidArgumentError, match="dense gradients, got a sparse one of parameter 'weight'"
        ):
            replica(torch.tensor([1, 2])).sum().backward()

    def test_a_parameter_that_was_frozen(self, client: gradserve.Client, name: str) -> None:
        model = network()
        model[0].requires_grad_(False)
        hook = comm_hook(client, model, num_required=1, name=name)
        replica = DistributedDataParallel(model.requires_grad_())
        replica.register_comm_hook(None, hook)
        with pytest.raises(gradserve.InvalidArgumentError, match="frozen, when the hook was made"):
            backward(replica, torch.ones(2, 4))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"model": torch.nn.ReLU()}, "parameters that require a gradient in model, got none"),
            ({"model": Complex()}, "for parameter 'w', got torch.complex64"),
            ({"model": "net"}, "a torch.nn.Module for model, got str"),
            ({"name": ""}, "the name of the run for name, got ''"),
            ({"name": 3}, "name"),
            ({"num_required": 0}, "a positive number of workers for num_required, got 0"),
            ({"num_required": 1.5}, "num_required"),
            ({"worker_id": 7}, "worker_id"),
            ({"keep_averages": -1}, "keep_averages"),
        ],
    )
    def test_arguments(self, client: gradserve.Client, name: str, given: dict[str, Any], message: str) -> None:
        arguments: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "name": name, "num_required": 1} | given
        with pytest.raises(gradserve.InvalidArgumentError, match=message):
            comm_hook(client, **arguments)


@pytest.mark.usefixtures("_small_groups")
def test_gradients_that_were_dropped_are_logged_once(
    client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = (replica_of(client, network(), name, worker_id=each) for each in ("early", "late"))
    backward(early, torch.ones(2, 4))
    caplog.set_level("INFO", "gradserve.training")
    backward(late, torch.ones(2, 4))
    (record,) = caplog.records
    assert record.message.startswith(f"the gradient of worker 'late' at step 0 of training run {name!r} was dropped")


@pytest.mark.usefixtures("_small_groups")
def test_a_run_that_there_is_already(client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        backward(replica_of(client, network(), name, step=0), torch.ones(2, 4))
    replica_of(client, network(), name, step=1, if_exists="error")
    with pytest.raises(gradserve.AlreadyExistsError, match="is at step 1, .* begins at step 0.*another name"):
        replica_of(client, network(), name, if_exists="error")
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    with pytest.raises(gradserve.InvalidArgumentError, match="if_exists"):
        replica_of(client, network(), name, if_exists="new")
