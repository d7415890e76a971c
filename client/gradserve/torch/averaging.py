"""Averages gradients over workers when an optimizer takes its step; gives all workers the same weights at the start."""

from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from numpy.typing import NDArray

from gradserve.client import Client
from gradserve.data import Batches
from gradserve.results import DenseSpec
from gradserve.torch.optimizers import (
    Arguments,
    Schedule,
    settings_of,
    unwrapped,
    unwrapped_scheduler,
    with_own_gradients,
)
from gradserve.torch.parameters import Gradients, module_of, trained_parameters
from gradserve.torch.state import TrainingState
from gradserve.training import Worker
from gradserve_protocol.errors import InvalidArgumentError


def broadcast_parameters(
    client: Client,
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    name: str,
    send_frozen: bool = True,
    leave_out: Collection[str] = (),
    container: str = "",
    timeout: float | None = None,
) -> bool:
    """Gives all workers of a run the weights of the first one: its parameters, buffers, and its optimizer's state.

    The first worker that calls this gives, all later ones take, however late they come: they begin where the first one
    began. Call it before `comm_hook` or `all_reduce_hook`. `average_gradients` does not need it.

    Args:
        client: The client.
        model: The model, in which weights are replaced. A DistributedDataParallel is looked into.
        optimizer: Its optimizer, if it has a state that must be equal, such as one loaded from a checkpoint.
        name: The name of the run.
        send_frozen: Whether frozen parameters are given, too; see `average_gradients`.
        leave_out: Names, or patterns of names, of frozen parameters and buffers that are not given.
        container: The namespace of the name.
        timeout: Seconds to wait for the weights. None: the client's timeout. math.inf: no limit.

    Returns:
        Whether the weights were replaced by those of another worker.

    Raises:
        InvalidArgumentError: The first worker has another model or optimizer, or an argument is not valid.
        AlreadyExistsError: The first worker has another model.
        GradserveError: The server cannot be reached, or refuses.
    """
    specs = {key: DenseSpec(each.dtype, tuple(each.shape)) for key, each in trained_parameters(model).items()}
    optimizer = None if optimizer is None else unwrapped(optimizer)
    state = TrainingState(module_of(model), optimizer, send_frozen=send_frozen, leave_out=leave_out)
    run = f"{name}/broadcast"
    with Worker(client, specs, name=run, num_required=1, container=container, timeout=timeout) as worker:
        received = worker.begin(state.captured)
    if received is not None:
        state.load(received)
    return received is not None


def average_gradients(
    client: Client,
    model: torch.nn.Module,
    optimizer: Any,
    *,
    num_required: int,
    name: str,
    scheduler: Any = None,
    worker_id: str | None = None,
    start_step: int | None = None,
    missing: Literal["error", "zeros"] = "error",
    keep_averages: int = 4,
    send_frozen: bool = True,
    leave_out: Collection[str] = (),
    timeout: float | None = None,
    container: str = "",
    refuse_non_finite: bool = True,
    durability: str | None = None,
    idle_lease: float | None = None,
    settings: Mapping[str, str] | None = None,
    if_exists: Literal["join", "new", "error"] = "join",
    compare_every: int | None = None,
    data: Batches[Any] | None = None,
) -> "Averaging":
    """Lets an optimizer step with the gradients' averages over the workers of a run, until the end of the block.

        with (
            gradserve.connect("server:50051") as client,
            gradserve.torch.average_gradients(client, model, optimizer, num_required=4, name="net"),
        ):
            train(model, optimizer)

    At the start of the block, all workers of a new run get the weights of the first one; a worker that joins later gets
    the parameters, buffers and optimizer state of another worker, at its step. Then each `optimizer.step()` sends the
    gradients, waits for those of the others, and steps with the average. As all workers take the same steps, their
    weights stay equal.

    If a round has ended without this worker, its gradients are dropped, and it takes the steps that it missed, one
    after the other, in one call of `optimizer.step()`. If they were too many, it takes over the state of another
    worker.

    Args:
        client: The client, which must stay open.
        model: The model. Its parameters that require a gradient are averaged. A DistributedDataParallel is looked into.
        optimizer: The optimizer of all these parameters, and of no others. Wrappers by Accelerate and Lightning are
            looked into, also those of the scheduler.
        num_required: The number of gradients that end a round: the number of workers, or fewer if some are backups.
        name: The name of the run.
        scheduler: The learning rate scheduler, if the optimizer has one. The program steps it once after each
            `optimizer.step()`; until the end of the block, calls beside these change nothing. It is also stepped for
            the steps that this worker missed, and its state goes to workers that join.
        worker_id: This worker's id, different from that of every other worker. None: that of
            GRADSERVE_WORKER_ID, or a new one.
        start_step: The number of steps of this run that the weights have behind them, if they come from a checkpoint.
            None: the weights are taken over from other workers, or are those of a new run.
        missing: Whether a parameter without a gradient is an error, or has zeros as its gradient. One of which no
            worker of a round had a gradient stays without one, `grad = None`, so the optimizer leaves it alone. The
            same for all workers.
        keep_averages: The number of averages that the server keeps for late workers.
        send_frozen: Whether a worker that begins gets frozen parameters, too. False: all have loaded the same ones,
            such as those below a LoRA.
        leave_out: Names of frozen parameters and buffers that stay each worker's own from the start, or patterns of
            names: "*.cache". Buffers that are not persistent always do. The same for all workers.
        timeout: Seconds to wait for other workers; and for a server that is gone, unless GRADSERVE_RESTART_PATIENCE is
            set. None: the client's timeout. math.inf: no limit.
        container: The namespace of the name.
        refuse_non_finite: Whether gradients with infinities or NaN are refused, with an InvalidArgumentError that names
            the parameter. Otherwise they reach the weights of all workers.
        durability: What the server keeps of the run on its disk, as in `Client.gradient_accumulator`. None: what the
            server was started with.
        idle_lease: Seconds after its last use by a worker at which the run is deleted. None: never.
        settings: What else all workers must have been started with, as texts by name. The optimizer's class and
            options, and those of the scheduler that are not functions, are compared anyway.
        if_exists: What to do if there is a run of this name that has taken steps. "join": go on with its state. "new":
            the same if any of its workers is there; otherwise delete it and start over. "error": raise
            AlreadyExistsError.
        compare_every: Compare the parameters of all workers, bit by bit, at every step that this divides: a digest of
            them travels with the gradients, and the server compares. A worker whose parameters differ from those of
            most gets an AbortedError out of `optimizer.step()`, and the others log it. None: every 10 steps, or up to
            1,000 if the model is large, and a difference is only logged. 0: never.
        data: The batches of this worker, made by `gradserve.data`, if the run shares them out: each sample counts once
            per epoch, however workers come and go. The same for all workers.

    Raises:
        InvalidArgumentError: The model and the optimizer have different parameters, a parameter has a dtype that cannot
            be averaged, the scheduler goes by a metric or was not given, or an argument is not valid.
        AlreadyExistsError: Another worker of the run has another model, or another `num_required`; or, at the start of
            the block, another optimizer, scheduler or other settings: the message has both values.
        GradserveError: No worker answers, or the server cannot be reached, or refuses.

    `optimizer.step()` raises:
        InvalidArgumentError: A parameter has no gradient, a sparse one, or one with infinities or NaN; the optimizer
            calls its closure more than once; or a GradScaler has left unscaling to the optimizer.
        DeadlineExceededError: Too few workers sent their gradients in time; the message says which are missing.
        GradserveError: See `GradientAccumulator.push_pull`.
    """
    stepped, optimizer = optimizer, unwrapped(optimizer)
    scheduler = unwrapped_scheduler(scheduler)
    parameters = trained_parameters(model)
    _check_same_parameters(parameters, optimizer)
    schedule = Schedule(stepped, scheduler)
    state = TrainingState(module_of(model), optimizer, scheduler, send_frozen=send_frozen, leave_out=leave_out)
    specs = {key: DenseSpec(each.dtype, tuple(each.shape)) for key, each in parameters.items()}
    worker = Worker(
        client,
        specs,
        name=name,
        num_required=num_required,
        worker_id=worker_id,
        keep_averages=keep_averages,
        timeout=timeout,
        missing=missing,
        container=container,
        refuse_non_finite=refuse_non_finite,
        durability=durability,
        idle_lease=idle_lease,
        settings={
            "torch": {**settings_of(optimizer, scheduler, is_fresh=start_step is None), **(settings or {})},
        },
        if_exists=if_exists,
        compare_every=compare_every,
        compared=lambda: {key: _bits_of(each) for key, each in parameters.items()},
        data=data,
    )
    gradients = Gradients(parameters, zeros_for_missing=missing == "zeros")
    return Averaging(worker, gradients, state, optimizer, schedule, start_step)


class Averaging:
    """A worker's part in a run, made by `average_gradients`. A context manager.

    Attributes:
        weight: The weight of the next gradients in the mean: the size of the batch, where batches differ.
    """

    def __init__(
        self,
        worker: Worker,
        gradients: Gradients,
        state: TrainingState,
        optimizer: Any,
        schedule: Schedule,
        start_step: int | None,
    ) -> None:
        self._worker = worker
        self._gradients = gradients
        self._state = state
        self._optimizer = optimizer
        self._schedule = schedule
        self._start_step = start_step
        self._num_parameters = _num_parameters(optimizer)
        self.weight = 1.0
        self._hook: Any = None
        self._is_catching_up = False

    @property
    def step(self) -> int:
        """The number of steps of the run that the weights have behind them."""
        return self._worker.step

    @property
    def worker_id(self) -> str:
        """This worker's id."""
        return self._worker.worker_id

    def __enter__(self) -> Self:
        try:
            received = self._worker.begin(self._state.captured, start_step=self._start_step)
            if received is not None:
                self._state.load(received)
            self._schedule.begin()
            self._hook = self._optimizer.register_step_pre_hook(self._before_step)
        except BaseException:
            self._worker.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._schedule.end()
        self._worker.__exit__(kind, error, traceback)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
        """Replaces gradients by averages; takes all steps that this worker is late by, but the last one."""
        if torch.compiler.is_compiling():
            late: Arguments | None = torch.compiler.disable(self._before_step)(optimizer, args, kwargs)
            return late
        if self._is_catching_up:
            return None
        self._check_step(optimizer)
        replaced = with_own_gradients(optimizer, args, kwargs)
        advance = self._worker.exchange(self._gradients.to_send(), self.weight)
        if advance.state is not None:
            self._state.load(advance.state)
        for average in advance.averages[:-1]:
            self._gradients.replace(average)
            self._step_again()
        if advance.averages:
            self._gradients.replace(advance.averages[-1])
        else:
            self._gradients.drop()  # the state of another worker has this step behind it already
        self._schedule.own_step(is_behind=bool(advance.averages))
        return replaced

    def _step_again(self) -> None:
        self._is_catching_up = True
        try:
            self._optimizer.step()
            self._schedule.missed_step()
        finally:
            self._is_catching_up = False

    def _check_step(self, optimizer: Any) -> None:
        self._schedule.check_step()
        if _num_parameters(optimizer) != self._num_parameters:
            raise InvalidArgumentError(
                f"the optimizer has {_num_parameters(optimizer)} parameters, and had {self._num_parameters} when "
                "average_gradients began; add all groups of parameters before it begins",
                field="optimizer",
            )


def _bits_of(parameter: torch.Tensor) -> NDArray[Any]:
    bits: NDArray[Any] = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return bits


def _num_parameters(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _check_same_parameters(parameters: Mapping[str, torch.Tensor], optimizer: Any) -> None:
    optimized = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    left_out = [name for name, each in parameters.items() if id(each) not in optimized]
    if left_out:
        raise InvalidArgumentError(
            f"the optimizer does not have {len(left_out)} of the model's parameters: "
            f"{', '.join(map(repr, left_out[:5]))}. Add them to it, set requires_grad=False if they are not trained, "
            "or pass the part of the model that it trains",
            field="optimizer",
        )
    num_others = len(optimized - {id(each) for each in parameters.values()})
    if num_others:
        raise InvalidArgumentError(
            f"the optimizer has {num_others} parameters that the model does not have, so they would not be averaged; "
            "pass a model that contains all of them, for example a torch.nn.ModuleList",
            field="model",
        )
