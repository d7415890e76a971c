"""The whole demo: data, server, workers, the one-process run, report and plot."""

import math
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import gradserve
from gradserve_demo.digits import Batches, Digits, load_digits
from gradserve_demo.network import (
    TANH,
    BatchNormLayer,
    HiddenLayer,
    Weights,
    accuracy,
    descend,
    initial_weights,
    loss_and_gradients,
    max_difference,
    mean_loss,
)
from gradserve_demo.options import DemoError, DemoOptions
from gradserve_demo.processes import ServerProcess, WorkerPool
from gradserve_demo.report import AccuracyPoint, DemoReport, TrainingResult, WorkerResult, save_plot
from gradserve_demo.served import create_layer
from gradserve_demo.worker import Finished, Message, Ready, Stepped, WorkerTask

_CLASSES = 10
PLOT_NAME = "training.png"


def run_demo(options: DemoOptions, *, console: Console | None = None) -> DemoReport:
    """Trains with several workers and in one process, compares, and saves a plot.

    Blocks until everything is done. When it returns or raises, all processes that it started
    have ended.

    Args:
        options: The options of the demo.
        console: The console for the progress bars; standard output by default.

    Returns:
        The report; its `problem` says whether the two runs agree.

    Raises:
        DemoError: A worker or the server failed or hung.
        gradserve.GradserveError: The server cannot be reached, or refuses a call.
        OSError: The output folder cannot be written.
    """
    console = console or Console()
    # First: a folder that cannot be created should not cost the user a training run.
    options.output.mkdir(parents=True, exist_ok=True)
    digits = load_digits(options.seed)
    plan = _plan(options, digits)
    with _progress(console) as progress:
        with ExitStack() as stack:
            if options.address is None:
                address = stack.enter_context(ServerProcess(options.timeout)).address
            else:
                address = options.address
            distributed, workers = _train_with_workers(options, plan, digits, address, progress)
        bar = progress.add_task("in one process", total=plan.num_steps, loss=np.nan)
        single = _train_in_one_process(
            options, plan, digits, lambda step, loss: progress.update(bar, completed=step, loss=loss)
        )
    plot = options.output / PLOT_NAME
    save_plot(plot, distributed, single, options)
    return DemoReport(
        num_required=options.workers,
        sync_every=options.sync_every,
        num_steps=plan.num_steps,
        distributed=distributed,
        single=single,
        workers=workers,
        plot=plot,
        max_weight_difference=max_difference(distributed.weights, single.weights),
    )


@dataclass(frozen=True)
class _Plan:
    """The settings and data that both training runs share."""

    batches: Batches
    num_steps: int
    weights: Weights
    batch_norm: bool

    def local_layer(self) -> HiddenLayer:
        """Returns the hidden layer in NumPy, in its initial state; in training it takes joint batches."""
        return BatchNormLayer(len(self.weights["gamma"]), self.batches.num_workers) if self.batch_norm else TANH


def _plan(options: DemoOptions, digits: Digits) -> _Plan:
    try:
        batches = Batches(len(digits.train_labels), options.num_processes, options.batch_size, options.seed)
    except ValueError as error:
        raise DemoError(str(error)) from None
    num_inputs = digits.train_images.shape[1]
    weights = initial_weights(num_inputs, options.hidden, _CLASSES, options.seed, batch_norm=options.batch_norm)
    return _Plan(batches, options.epochs * batches.steps_per_epoch, weights, options.batch_norm)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        console=console,
    )


def _train_with_workers(
    options: DemoOptions, plan: _Plan, digits: Digits, address: str, progress: Progress
) -> tuple[TrainingResult, tuple[WorkerResult, ...]]:
    """Runs the workers against a server and collects their reports."""
    name = f"{options.num_processes} workers" + (f" ({options.workers} needed)" if options.backup else "")
    name += ", by DiLoCo" if options.diloco else ""
    bar = progress.add_task(f"with {name}", total=plan.num_steps, loss=np.nan)
    run_name = f"demo-{uuid.uuid4().hex}"
    tasks = [
        WorkerTask(index, options, address, run_name, plan.num_steps, plan.weights, digits, plan.batches)
        for index in range(options.num_processes)
    ]
    course = _Course(options, plan, digits, progress, bar)
    killed_at: int | None = None
    with _resources(options, plan, address, run_name), WorkerPool(tasks, options.timeout) as pool:
        ready: set[int] = set()
        for index, message in pool.messages():
            if isinstance(message, Ready):
                if len(ready) == len(tasks):
                    pool.start(index)  # again
                    continue
                ready.add(index)
                if len(ready) == len(tasks):
                    course.begin()
                    for each in ready:
                        pool.start(each)
                continue
            course.add(index, message)
            if (
                isinstance(message, Stepped)
                and index == options.killed
                and killed_at is None
                and plan.num_steps // 2 <= message.step < plan.num_steps
            ):
                killed_at = message.step
                pool.kill_and_restart(index)
    return course.result(), course.worker_results(tasks, killed_at)


@contextmanager
def _resources(options: DemoOptions, plan: _Plan, address: str, run_name: str) -> Iterator[None]:
    """Creates the layer that the workers share; deletes everything of the run at the end."""
    with gradserve.connect(address, timeout=options.timeout) as client:
        client.server_info()  # or every worker would find out by itself that there is no server
        if plan.batch_norm:
            create_layer(client, run_name, len(plan.weights["gamma"]))
        try:
            yield
        except BaseException:
            # If the server is what failed, this second error must not hide the first one.
            with suppress(gradserve.GradserveError):
                _delete(client, run_name)
            raise
        _delete(client, run_name)


def _delete(client: gradserve.Client, run_name: str) -> None:
    client.delete_parameters(run_name)
    for layer in client.list_batch_norm_layers(scope=run_name):
        client.delete_batch_norm_layer(layer.name)


class _Course:
    """Collects the course of a training run from the workers' reports."""

    def __init__(self, options: DemoOptions, plan: _Plan, digits: Digits, progress: Progress, bar: TaskID) -> None:
        self._options = options
        self._plan = plan
        self._digits = digits
        self._layer = plan.local_layer()
        self._progress = progress
        self._bar = bar
        self._begin = self._end = 0.0
        # By step: the losses of the workers whose gradients are in the round.
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        # By worker: the gradients that were in a round, and those that were too late.
        self._contributed: Counter[int] = Counter()
        self._stale: Counter[int] = Counter()
        self._accuracies = [AccuracyPoint(0, self._accuracy(plan.weights | self._layer.state()))]
        self._finished: dict[int, Finished] = {}

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def add(self, index: int, message: Message) -> None:
        if isinstance(message, Finished):
            self._finished[index] = message
            self._end = time.perf_counter()
        elif isinstance(message, Stepped):
            (self._contributed if message.accepted else self._stale)[index] += 1
            if message.accepted:
                for step, loss in enumerate(message.losses, message.step - len(message.losses)):
                    self._add_loss(step, loss)
            if message.accuracy is not None:
                self._accuracies.append(AccuracyPoint(message.step, message.accuracy))

    def result(self) -> TrainingResult:
        weights = self._common_weights()
        return TrainingResult(
            losses=tuple(_mean(self._losses[step]) for step in range(self._plan.num_steps)),
            accuracies=tuple(self._accuracies),
            weights=weights,
            final_loss=mean_loss(weights, self._digits.train_images, self._digits.train_labels, self._layer),
            final_accuracy=self._accuracy(weights),
            seconds=self._end - self._begin,
        )

    def worker_results(self, tasks: list[WorkerTask], killed_at: int | None) -> tuple[WorkerResult, ...]:
        return tuple(
            WorkerResult(
                worker_id=task.worker_id,
                slow=task.is_slow,
                contributed=self._contributed[task.index],
                stale=self._stale[task.index],
                killed_at=killed_at if task.index == self._options.killed else None,
            )
            for task in tasks
        )

    def _add_loss(self, step: int, loss: float) -> None:
        losses = self._losses[step]
        losses.append(loss)
        # Rounds end in order: the last gradient of a round is reported before the last of the next round.
        if len(losses) == self._options.workers:
            self._progress.update(self._bar, completed=step + 1, loss=np.mean(losses))

    def _accuracy(self, weights: Weights) -> float:
        return accuracy(weights, self._digits.test_images, self._digits.test_labels, self._layer)

    def _common_weights(self) -> Weights:
        """Returns the final weights, which must be bit-identical for all workers."""
        first = self._finished[0]
        for index, finished in self._finished.items():
            is_equal = all(np.array_equal(first.weights[name], finished.weights[name]) for name in first.weights)
            if not is_equal or finished.digest != first.digest:
                raise DemoError(f"worker-{index} ended with other weights than worker-0")
        return first.weights


def _mean(losses: list[float]) -> float:
    """Returns the mean of the losses of a step; NaN if a killed worker has not reported the only one."""
    return float(np.mean(losses)) if losses else math.nan


def _train_in_one_process(
    options: DemoOptions, plan: _Plan, digits: Digits, on_step: Callable[[int, float], object]
) -> TrainingResult:
    """Trains on the joint batches of all workers; calls `on_step` with the steps taken so far and the batch's loss."""
    weights, batches, layer = plan.weights, plan.batches, plan.local_layer()

    def test_accuracy() -> float:
        return accuracy(weights | layer.state(), digits.test_images, digits.test_labels, layer)

    losses: list[float] = []
    accuracies = [AccuracyPoint(0, test_accuracy())]
    begin = time.perf_counter()
    for step in range(plan.num_steps):
        examples = batches.joint(step)
        images, labels = digits.train_images[examples], digits.train_labels[examples]
        loss, gradients = loss_and_gradients(weights, images, labels, layer)
        weights = descend(weights, gradients, options.learning_rate)
        layer.end_step(weights)
        losses.append(loss)
        if (step + 1) % batches.steps_per_epoch == 0:
            accuracies.append(AccuracyPoint(step + 1, test_accuracy()))
        on_step(step + 1, loss)
    seconds = time.perf_counter() - begin
    weights = weights | layer.state()
    return TrainingResult(
        losses=tuple(losses),
        accuracies=tuple(accuracies),
        weights=weights,
        final_loss=mean_loss(weights, digits.train_images, digits.train_labels, layer),
        final_accuracy=test_accuracy(),
        seconds=seconds,
    )
