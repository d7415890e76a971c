"""What `average_gradients` refuses, and which workers do not go together."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import gradserve
from gradserve.torch import average_gradients
from tests.torch.training_threads import Optimizers, Training, adam, network, sgd, together, trainings


def by_a_metric(optimizer: Any) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer)


def by_a_metric_within(optimizer: Any) -> Any:
    outer = schedulers.ChainedScheduler([schedulers.ExponentialLR(optimizer, 0.9)])
    outer._schedulers.append(by_a_metric(optimizer))  # PyTorch refuses it, too; other libraries may not
    return outer


def with_an_object(parameters: Any) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.param_groups[0]["made_by"] = object()
    return optimizer


class Refused(NamedTuple):
    """Arguments of `average_gradients`, made for one network, and what the error says.

    Attributes:
        message: A pattern.
        model: The model, of the network.
        optimizer: The optimizer, of the network's modules.
        scheduler: The scheduler, of the optimizer.
        name: The name of the run; None for a new one.
    """

    message: str
    model: Callable[[Any], Any] = lambda modules: modules
    optimizer: Callable[[Any], Any] = lambda modules: sgd(modules.parameters())
    scheduler: Callable[[Any], Any] = lambda _optimizer: None
    name: str | None = None


REFUSED = {
    "parameters that the optimizer does not have": Refused(
        "does not have 4 .*: '0.weight', '0.bias', .* requires_grad=False",
        optimizer=lambda modules: sgd(modules[2].parameters()),
    ),
    "parameters that the model does not have": Refused(
        "4 parameters that the model does not have.*ModuleList", model=lambda modules: modules[2]
    ),
    "an optimizer whose state cannot travel": Refused(
        r"optimizer\.groups\[0\]\['made_by'\] is <obj", optimizer=lambda modules: with_an_object(modules.parameters())
    ),
    "no optimizer": Refused(r"a torch\.optim\.Optimizer for optimizer, got str", optimizer=lambda _: "sgd"),
    "no name": Refused("name", name=""),
    "a scheduler of another optimizer": Refused(
        "one of another optimizer", scheduler=lambda _: schedulers.StepLR(sgd(network().parameters()), 3)
    ),
    "no scheduler": Refused("a learning rate scheduler .* got int", scheduler=lambda _: 3),
    "a scheduler by a metric": Refused("ReduceLROnPlateau goes by metrics, which each worker", scheduler=by_a_metric),
    "one within another": Refused("ReduceLROnPlateau goes by metrics, which each worker", scheduler=by_a_metric_within),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_arguments_that_are_refused(client: gradserve.Client, name: str, refused: Refused) -> None:
    modules = network()
    optimizer = refused.optimizer(modules)
    scheduler = refused.scheduler(optimizer)
    run = name if refused.name is None else refused.name
    with pytest.raises(gradserve.InvalidArgumentError, match=refused.message):
        average_gradients(
            client, refused.model(modules), optimizer, num_required=1, name=run, scheduler=scheduler
        ).__enter__()


def test_parameters_that_are_not_trained_need_no_optimizer(client: gradserve.Client, name: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    average_gradients(client, model, sgd(model[2].parameters()), num_required=1, name=name)


OTHER_OPTIMIZERS: dict[str, tuple[Optimizers, str]] = {
    "class": (adam, r"optimizer is torch\.optim\.sgd\.SGD there and torch\.optim\.adamw\.AdamW here"),
    "learning rate": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        r"lr of group 0 of the optimizer is 0\.1 there and 0\.01 here",
    ),
    "groups": (
        lambda parameters: torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1, momentum=0.9),
        "number of groups of parameters is 1 there and 6 here",
    ),
}


class TestMistakes:
    def test_a_parameter_without_a_gradient(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as training:
            training.model(torch.ones(3, 4)).sum().backward()
            training.model[2].bias.grad = None
            with pytest.raises(
                gradserve.InvalidArgumentError, match=r"no gradient for 1 .*: '2.bias'\. .*missing='zeros'"
            ):
                training.optimizer.step()
            assert training.averaging.step == 0

    def test_gradients_that_are_not_finite(self, server_address: str, name: str) -> None:
        with trainings(server_address, name, 2, num_required=2) as (first, second):
            with pytest.raises(
                gradserve.InvalidArgumentError, match=r"expected finite values for component '0\.weight'"
            ):
                first.step(float("nan"))
            together(first.step, second.step)  # the other batch of the same step
            assert first.averaging.step == second.averaging.step == 1
            assert first.everything[0] == second.everything[0]

    def test_gradients_that_are_not_finite_may_be_let_through(self, server_address: str, name: str) -> None:
        with Training(server_address, name, refuse_non_finite=False) as training:
            assert training.step(float("nan")) == 1

    def test_sparse_gradients(self, client: gradserve.Client, name: str) -> None:
        model = torch.nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with average_gradients(client, model, optimizer, num_required=1, name=name):
            model(torch.tensor([1, 2])).sum().backward()
            with pytest.raises(
                gradserve.InvalidArgumentError, match="sparse one of parameter 'weight'; .* sparse=False"
            ):
                optimizer.step()

    def test_an_optimizer_that_computes_several_gradients_in_a_step(self, server_address: str, name: str) -> None:
        with Training(server_address, name, lambda parameters: torch.optim.LBFGS(parameters)) as training:
            with pytest.raises(gradserve.InvalidArgumentError, match=r"got LBFGS\.step\(function\)") as failure:
                training.optimizer.step(lambda: torch.zeros(()))
            assert failure.value.field == "closure"
            assert training.averaging.step == 0

    def test_an_optimizer_that_calls_its_closure_twice(self, server_address: str, name: str) -> None:
        class Twice(torch.optim.Optimizer):
            def step(self, closure: Any = None) -> Any:
                closure()
                return closure()

        with Training(server_address, name, lambda parameters: Twice(parameters, {"lr": 0.1})) as training:
            training.model(torch.ones(3, 4)).sum().backward()
            with pytest.raises(gradserve.InvalidArgumentError, match="a second time in a step"):
                training.optimizer.step(lambda: torch.zeros(()))

    def test_an_argument_that_is_no_closure(self, server_address: str, name: str) -> None:
        with (
            Training(server_address, name) as training,
            pytest.raises(gradserve.InvalidArgumentError, match=r"with a closure .* got SGD\.step\(float\)"),
        ):
            training.optimizer.step(0.5)

    def test_another_model(self, server_address: str, name: str) -> None:
        with Training(server_address, name):
            other = torch.nn.Linear(4, 2)
            with gradserve.connect(server_address) as client, pytest.raises(gradserve.AlreadyExistsError) as raised:
                average_gradients(client, other, sgd(other.parameters()), num_required=1, name=name)
        assert any("need the same parameters" in note for note in raised.value.__notes__)

    def test_another_number_of_workers(self, server_address: str, name: str) -> None:
        with (
            Training(server_address, name),
            pytest.raises(gradserve.AlreadyExistsError, match="num_required") as raised,
        ):
            Training(server_address, name, num_required=3)
        assert any("the same num_required" in note for note in raised.value.__notes__)

    def test_a_worker_that_is_started_again_at_step_0(self, server_address: str, name: str) -> None:
        with Training(server_address, name, keep_averages=1) as first:
            for _ in range(3):
                first.step()
            again = Training(server_address, name, start_step=0, keep_averages=1, timeout=0.2)
            with again.averaging, pytest.raises(gradserve.DeadlineExceededError) as raised:
                again.step()
        assert any("is at step 3" in note and "start_step=" in note for note in raised.value.__notes__)

    def test_a_run_that_there_is_already(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as first:
            first.step()
            with pytest.raises(gradserve.AlreadyExistsError, match='is at step 1, .*if_exists="new"'):
                Training(server_address, name, if_exists="error").__enter__()

    def test_other_dtypes(self, server_address: str, name: str) -> None:
        with Training(server_address, name):
            other = network().bfloat16()
            with (
                gradserve.connect(server_address) as client,
                pytest.raises(gradserve.AlreadyExistsError, match="dtype"),
            ):
                average_gradients(client, other, sgd(other.parameters()), num_required=1, name=name)

    @pytest.mark.parametrize(("other", "difference"), OTHER_OPTIMIZERS.values(), ids=list(OTHER_OPTIMIZERS))
    def test_another_optimizer(self, server_address: str, name: str, other: Any, difference: str) -> None:
        with Training(server_address, name, sgd) as first:
            for steps in (0, 1):  # at the start, and for one that joins
                with pytest.raises(gradserve.AlreadyExistsError, match=difference):
                    Training(server_address, name, other).__enter__()
                for _ in range(steps):
                    first.step()

    def test_another_schedule(self, server_address: str, name: str) -> None:
        def begin(make: Callable[[Any], Any], **options: Any) -> None:
            model = network()
            optimizer = sgd(model.parameters())
            options = {"num_required": 1, "name": name, "scheduler": make(optimizer), **options}
            with gradserve.connect(server_address) as client, average_gradients(client, model, optimizer, **options):
                pass

        schedulers = torch.optim.lr_scheduler
        begin(lambda optimizer: schedulers.MultiStepLR(optimizer, [5, 9]), settings={"data": "v1"})
        begin(lambda optimizer: schedulers.MultiStepLR(optimizer, [5, 9]))
        for make, difference in (
            (
                lambda optimizer: schedulers.MultiStepLR(optimizer, [5, 8]),
                r"milestones .* \{5: 1, 9: 1\} there and .* 8: 1",
            ),
            (
                lambda optimizer: schedulers.StepLR(optimizer, 5),
                r"scheduler is torch.*MultiStepLR there and .*StepLR here",
            ),
            (lambda _: None, "MultiStepLR there and none here"),
        ):
            with pytest.raises(gradserve.AlreadyExistsError, match=difference):
                begin(make)
        with pytest.raises(gradserve.AlreadyExistsError, match="data is v1 there and v2 here"):
            begin(lambda optimizer: schedulers.MultiStepLR(optimizer, [5, 9]), settings={"data": "v2"})

    def test_workers_that_are_missing(self, server_address: str, name: str) -> None:
        with (
            Training(server_address, name, num_required=2, worker_id="w0", timeout=0.05) as training,
            pytest.raises(gradserve.DeadlineExceededError, match=r"1 gradient is in \(workers: w0") as raised,
        ):
            training.step()
        assert "docs/elastic.md" in raised.value.__notes__[-1]

    def test_groups_that_are_added_later(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as training:
            training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
            with pytest.raises(gradserve.InvalidArgumentError, match="has 7 parameters, and had 6 when"):
                training.step()

    def test_unscaling_that_is_left_to_the_optimizer(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as training:
            training.optimizer.grad_scale = torch.tensor(4.0)  # as a GradScaler does to fused optimizers
            with pytest.raises(gradserve.InvalidArgumentError, match=r"scaler\.unscale_\(optimizer\)"):
                training.step()


class TestSchedules:
    def test_one_that_was_not_passed(self, client: gradserve.Client, name: str) -> None:
        model = network()
        optimizer = sgd(model.parameters())
        with average_gradients(client, model, optimizer, num_required=1, name=name):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            with pytest.raises(gradserve.InvalidArgumentError, match="was not given.*ChainedScheduler"):
                optimizer.step()
        with pytest.raises(gradserve.InvalidArgumentError, match="was not given.*ChainedScheduler"):
            average_gradients(client, model, optimizer, num_required=1, name=name)
        del scheduler

    def test_one_that_is_not_stepped_with_each_step(self, server_address: str, name: str) -> None:
        with Training(server_address, name) as training:
            training.step()
            training.model(torch.ones(3, 4)).sum().backward()
            training.optimizer.step()
            with pytest.raises(
                gradserve.InvalidArgumentError, match=r"was not stepped .* factor\(step // steps_per_epoch"
            ):
                training.optimizer.step()
            training.scheduler.step()
            assert training.step() == 3

    def test_one_that_is_stepped_more_often(
        self, server_address: str, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Training(server_address, name) as training:
            for _ in range(2):
                training.step()
                training.scheduler.step()
            assert training.scheduler.last_epoch == 2
            assert "step" not in training.scheduler.state_dict()
            assert isinstance(training.scheduler, torch.optim.lr_scheduler.ExponentialLR)
        assert [each.message.startswith("a call of scheduler.step()") for each in caplog.records] == [True]
        training.scheduler.step()
        assert training.scheduler.last_epoch == 3
