"""Averaging when an optimizer steps; each worker is a thread with a model, an optimizer and a client of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import gradserve
from gradserve.torch import Averaging, average_gradients
from tests.torch.training_threads import Optimizers, Training, adam, network, sgd, together, trainings


@pytest.mark.parametrize("optimizers", [sgd, adam])
def test_equal_weights_from_the_first_worker(server_address: str, name: str, optimizers: Optimizers) -> None:
    with trainings(server_address, name, 2, optimizers=optimizers, num_required=2) as workers:
        assert workers[1].everything == workers[0].everything
        initial = [parameter.tolist() for parameter in network(0).parameters()]
        assert workers[1].everything[0] == initial
        for step in range(1, 4):
            assert together(*(partial(w.step, s) for s, w in enumerate(workers, 1))) == [step, step]
            assert workers[1].everything == workers[0].everything
        assert workers[0].everything[0] != initial


def test_it_steps_with_the_mean(server_address: str, name: str) -> None:
    with trainings(server_address, name, 2, num_required=2) as workers:
        workers[0].averaging.weight, workers[1].averaging.weight = 1, 3
        expected = [parameter.detach().clone() for parameter in workers[0].model.parameters()]
        gradients = []
        for scale in (1, 2):
            model = network(0)
            model(scale * torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        together(*(partial(w.step, s) for s, w in enumerate(workers, 1)))
        for before, after, mine, theirs in zip(expected, workers[0].model.parameters(), *gradients, strict=True):
            torch.testing.assert_close(after.detach(), before - 0.1 * (mine + 3 * theirs) / 4, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizers", [sgd, adam])
def test_a_closure_computes_the_gradients_of_a_step(server_address: str, name: str, optimizers: Optimizers) -> None:
    """As of Lightning, which gives optimizers the backward pass as a closure."""
    with trainings(server_address, name, 3, optimizers=optimizers, num_required=2) as (usual, other, late):

        def step_with_closure(training: Training, scale: float) -> float:
            losses = []

            def closure() -> torch.Tensor:
                training.optimizer.zero_grad()
                losses.append(training.model(scale * torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean())
                losses[-1].backward()
                return losses[-1]

            with torch.no_grad():  # closures of PyTorch's optimizers compute gradients all the same
                returned = training.optimizer.step(closure=closure)
            training.scheduler.step()
            assert [returned] == losses
            return training.averaging.step

        for step in (1, 2):
            assert together(partial(usual.step, 1), partial(step_with_closure, other, 2)) == [step, step]
        assert step_with_closure(late, 3) == 2
        assert usual.everything == other.everything == late.everything


class TestLateWorkers:
    @pytest.mark.parametrize("optimizers", [sgd, adam])
    def test_it_takes_the_steps_that_it_missed(self, server_address: str, name: str, optimizers: Optimizers) -> None:
        with trainings(server_address, name, 2, optimizers=optimizers) as (early, late):
            for scale in (1, 2, 3):
                early.step(scale)
            assert late.step(7) == 3
            assert late.everything == early.everything
            assert late.step(2) == 4
            assert early.step(5) == 4
            assert late.everything == early.everything

    def test_one_that_is_too_late_takes_over_the_state_of_another(self, server_address: str, name: str) -> None:
        with trainings(server_address, name, 3, optimizers=adam, num_required=2, keep_averages=2) as workers:
            first, second, late = workers
            for _ in range(4):
                together(first.step, second.step)
            # The first one waits for a second gradient, and answers meanwhile.
            together(first.step, lambda: [late.step(7), late.step()])
            assert late.averaging.step == first.averaging.step == 5
            assert late.everything == first.everything

    def test_backup_workers(self, server_address: str, name: str) -> None:
        with trainings(server_address, name, 3, num_required=2) as workers:
            for _ in range(2):
                together(workers[0].step, workers[1].step)
            assert workers[2].step() == 2
            assert workers[2].everything == workers[0].everything == workers[1].everything


class TestJoining:
    @pytest.mark.parametrize("optimizers", [sgd, adam])
    def test_a_worker_that_joins_begins_where_the_others_are(
        self, server_address: str, name: str, optimizers: Optimizers
    ) -> None:
        with trainings(server_address, name, 2, optimizers=optimizers, num_required=2) as (first, second):
            for scale in (1, 2):
                together(partial(first.step, scale), second.step)
            second.averaging._worker.close()  # as if it had died
            newcomer = Training(server_address, name, optimizers, seed=5, num_required=2)

            def join() -> list[Any]:
                newcomer.__enter__()
                joined = [*newcomer.everything, newcomer.model[1].num_batches_tracked.item()]
                newcomer.step()
                return joined

            before = [*first.everything, 3]  # the batch of the step that the newcomer takes part in is counted already
            _, joined = together(first.step, join)
            assert joined == before
            assert newcomer.averaging.step == first.averaging.step == 3
            assert newcomer.everything == first.everything
            newcomer.averaging._worker.close()
            newcomer.client.close()

    @pytest.mark.parametrize(
        ("schedule", "rates"),
        [
            (lambda o: schedulers.MultiStepLR(o, [4], 0.1), [0.1, 0.1, 0.1, 0.01, 0.01]),
            (
                lambda o: schedulers.SequentialLR(
                    o, [schedulers.ConstantLR(o, 0.5, 1), schedulers.MultiStepLR(o, [2], 0.1)], [1]
                ),
                [0.1, 0.1, 0.01, 0.01, 0.01],
            ),
        ],
        ids=["MultiStepLR", "SequentialLR"],
    )
    def test_the_schedule_goes_on(
        self, server_address: str, name: str, schedule: Callable[[Any], Any], rates: list[float]
    ) -> None:
        """What a schedule remembers has keys that are integers."""
        seen = []
        for number in (2, 3):
            model = network(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = schedule(optimizer)
            with (
                gradserve.connect(server_address) as client,
                average_gradients(client, model, optimizer, num_required=1, name=name, scheduler=scheduler),
            ):
                for _ in range(number):
                    model(torch.ones(3, 4)).sum().backward()
                    optimizer.step()
                    scheduler.step()
                    seen.append(optimizer.param_groups[0]["lr"])
        assert seen == pytest.approx(rates)

    def test_a_newcomer_takes_nobody_down(self, server_address: str, name: str) -> None:
        """From the first step on, the optimizer remembers what cannot travel: only the one that comes is told."""
        with Training(server_address, name, worker_id="w0") as first:
            first.step()
            for each in first.optimizer.state.values():
                each["callback"] = print
            newcomer = Training(server_address, name, seed=5)

            def join() -> None:
                with pytest.raises(
                    gradserve.InvalidArgumentError, match=r"worker 'w0' is training .*'callback'\] is <"
                ):
                    newcomer.__enter__()

            with ThreadPoolExecutor(1) as threads:
                joined = threads.submit(join)
                while not joined.done():
                    first.step()
            joined.result()
            newcomer.client.close()

    def test_a_run_is_continued_from_a_checkpoint(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as first:
            for _ in range(3):
                step = first.step()
        again = Training(server_address, name, start_step=step, seed=9)
        again.model.load_state_dict(first.model.state_dict())
        again.optimizer.load_state_dict(first.optimizer.state_dict())
        again.scheduler.load_state_dict(first.scheduler.state_dict())
        with again:
            assert again.everything == first.everything
            assert again.step() == 4

    def test_a_run_that_has_ended_goes_on_with_its_last_state(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as first:
            first.step()
        with Training(server_address, name, seed=3) as again:
            assert again.everything == first.everything


class TestScripts:
    def test_the_optimizer_is_as_before_after_the_block(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as training:
            training.step()
        with training.client:
            training.step()
            assert training.averaging.step == 1

    def test_gradient_accumulation_and_clipping(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as training:
            for _ in range(3):
                training.model(torch.ones(3, 4)).sum().backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
            clipped = [parameter.grad.clone() for parameter in training.model.parameters()]
            training.optimizer.step()
            assert training.averaging.step == 1
            assert all(map(torch.equal, clipped, (parameter.grad for parameter in training.model.parameters())))

    def test_a_scaler_that_skips_a_step(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as training:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for scale, step in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
                training.optimizer.zero_grad()
                scaler.scale(training.model(scale * torch.ones(3, 4)).square().sum()).backward()
                scaler.step(training.optimizer)
                scaler.update()
                training.scheduler.step()  # as scripts do, after skipped steps, too
                assert training.scheduler.last_epoch == step
                assert training.averaging.step == step

    def test_parameters_of_several_dtypes(self, server_address: str, name: str) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=torch.bfloat16), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            gradserve.connect(server_address) as client,
            average_gradients(client, model, optimizer, num_required=1, name=name),
        ):
            model[1](model[0](torch.ones(2, 4, dtype=torch.bfloat16)).float()).sum().backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            assert all(map(torch.equal, gradients, (parameter.grad for parameter in model.parameters())))

    def test_missing_gradients_as_zeros(self, server_address: str, name: str) -> None:
        with trainings(server_address, name, 2, num_required=2, missing="zeros") as workers:
            for worker in workers:
                worker.model.zero_grad()
            workers[0].model(torch.ones(3, 4)).sum().backward()
            gradients = [parameter.grad.clone() for parameter in workers[0].model.parameters()]
            together(*(worker.optimizer.step for worker in workers))
            for gradient, parameter in zip(gradients, workers[1].model.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, gradient / 2)

    def test_a_parameter_that_nobody_used_stays_as_it_is(self, server_address: str, name: str) -> None:
        with trainings(server_address, name, 3, optimizers=adam, num_required=2, missing="zeros") as workers:
            first, second, late = workers
            before = first.model[2].bias.detach().clone()

            def step(worker: Training, uses_all: bool) -> None:
                worker.optimizer.zero_grad()
                hidden = worker.model[1](worker.model[0](torch.ones(3, 4)))
                (worker.model[2](hidden) if uses_all else hidden @ worker.model[2].weight.T).sum().backward()
                worker.optimizer.step()
                worker.scheduler.step()

            for _ in range(3):
                together(*(partial(step, worker, False) for worker in (first, second)))
            step(late, True)  # which comes too late, and takes the steps of the others
            for worker in workers:
                assert worker.model[2].bias.grad is None
                assert torch.equal(worker.model[2].bias, before)
                assert worker.everything == first.everything
            together(partial(step, first, False), partial(step, second, True))
            assert first.model[2].bias.grad is not None
            assert not torch.equal(first.model[2].bias, before)
            assert first.everything == second.everything

    def test_gradients_that_are_all_zero_are_not_missing(self, server_address: str, name: str) -> None:
        with Training(server_address, name, adam, missing="zeros") as training:
            before = training.model[2].weight.detach().clone()
            (0 * training.model(torch.ones(3, 4))).sum().backward()
            training.optimizer.step()
            assert torch.equal(training.model[2].weight.grad, torch.zeros_like(before))
            assert not torch.equal(training.model[2].weight, before)  # it decays


def test_the_block_says_where_the_worker_is(server_address: str, name: str) -> None:
    with Training(server_address, name, worker_id="w7") as training:
        assert isinstance(training.averaging, Averaging)
        assert (training.averaging.worker_id, training.averaging.step) == ("w7", 0)


def test_properties_of_the_run(client: gradserve.Client, server_address: str, name: str) -> None:
    with Training(server_address, name, container="other", idle_lease=3600.0, durability="none"):
        (info,) = [each for each in client.list_accumulators("other") if each.name == name]
        assert info.idle_lease == 3600.0


def test_weights_that_have_come_to_differ(server_address: str, name: str) -> None:
    with trainings(server_address, name, 3, optimizers=adam, num_required=3, compare_every=1) as workers:
        for _ in range(2):
            together(*(worker.step for worker in workers))
        with torch.no_grad():
            workers[2].model[0].bias.add_(1e-3)
        with ThreadPoolExecutor(3) as threads:
            failures = [each.exception() for each in [threads.submit(worker.step) for worker in workers]]
        assert failures[:2] == [None, None]
        assert isinstance(failures[2], gradserve.AbortedError)
        assert "equal at step 1" in str(failures[2])
