"""The results of the demo, as tables and as a plot of loss and accuracy."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradserve_demo.network import Weights
from gradserve_demo.options import DemoOptions

WEIGHT_TOLERANCE = 1e-5
"""The largest allowed difference between the weights of the two runs: float rounding, nothing more."""

ACCURACY_TOLERANCE = 0.03
"""The most by which the accuracy may be lower if late gradients were left out, or workers train by themselves.

About twice the worst seen after 20 epochs, whichever gradients were left out. After one or two epochs the
accuracy is still rising steeply, and the difference may be larger.
"""


@dataclass(frozen=True)
class AccuracyPoint:
    """The accuracy on the test images at one moment of a training run."""

    step: int
    """Number of rounds so far."""

    accuracy: float
    """Share of test images that were recognised."""


@dataclass(frozen=True)
class TrainingResult:
    """The course and the end of one training run."""

    losses: tuple[float, ...]
    """Mean loss of the batch, for each step."""

    accuracies: tuple[AccuracyPoint, ...]
    """Test accuracy at the start and after each epoch."""

    weights: Weights
    """The final weights, including the moving averages of batch normalization."""

    final_loss: float
    """Mean loss over all training images at the end."""

    final_accuracy: float
    """Share of test images recognised at the end."""

    seconds: float
    """Time from the first step to the last."""


@dataclass(frozen=True)
class WorkerResult:
    """The work of one worker."""

    worker_id: str
    """Its name on the server."""

    slow: bool
    """True if it was artificially slow."""

    contributed: int
    """Gradients that were part of a round."""

    stale: int
    """Gradients that came too late for their round."""

    killed_at: int | None
    """The step at which it was killed, and started again; None if it was not."""


@dataclass(frozen=True)
class DemoReport:
    """All results of the demo."""

    num_required: int
    """Gradients that completed a round."""

    sync_every: int
    """Steps of a worker between two rounds: 1, or more by DiLoCo."""

    num_steps: int
    """Steps in the training run."""

    distributed: TrainingResult
    """Training in several processes, with the weights on the server."""

    single: TrainingResult
    """The same training in one process, with the joint batches."""

    workers: tuple[WorkerResult, ...]
    """One entry per worker process."""

    plot: Path
    """The file of the plot."""

    max_weight_difference: float
    """Largest absolute difference between the final weights of the two runs."""

    @property
    def has_backup(self) -> bool:
        """True if there were more workers than a round needed."""
        return len(self.workers) > self.num_required

    @property
    def killed(self) -> WorkerResult | None:
        """The worker that was killed and started again; None if none was."""
        return next((worker for worker in self.workers if worker.killed_at is not None), None)

    @property
    def problem(self) -> str | None:
        """The reason why the two runs do not agree as they should; None if they do.

        Without backup workers the runs do the same arithmetic, so their weights must agree. With
        them every round leaves some examples out, and by DiLoCo every worker takes steps of its own, so only the
        accuracy can be compared.
        """
        if self.has_backup or self.sync_every > 1:
            missing = self.single.final_accuracy - self.distributed.final_accuracy
            # Written so that NaN is a problem too.
            if not missing <= ACCURACY_TOLERANCE:
                return f"the accuracy is {missing:.1%} below that of one process (the more epochs, the closer)"
            return None
        if not self.max_weight_difference <= WEIGHT_TOLERANCE:
            difference = f"{self.max_weight_difference:.1e}"
            return f"the weights differ by up to {difference}, more than {WEIGHT_TOLERANCE:.0e}"
        return None


def render(report: DemoReport) -> RenderableType:
    """Returns the report as a renderable for a rich console."""
    parts: list[RenderableType] = [_comparison(report)]
    if report.distributed.seconds > report.single.seconds:
        parts.append(_why_slower(report))
    if report.has_backup:
        parts.append(_workers(report))
    if report.killed is not None:
        parts.append(
            Text(
                f"{report.killed.worker_id} was killed at step {report.killed.killed_at}, was started again, read the "
                "newest weights and went on."
            )
        )
    parts.append(_verdict(report))
    parts.append(Text(f"Plot: {report.plot}"))
    return Group(*parts)


def _comparison(report: DemoReport) -> Table:
    table = Table(title=f"After {report.num_steps} steps")
    table.add_column("")
    table.add_column(f"{len(report.workers)} workers", justify="right")
    table.add_column("one process", justify="right")
    runs = (report.distributed, report.single)
    table.add_row("test accuracy", *(f"{run.final_accuracy:.2%}" for run in runs))
    table.add_row("training loss", *(f"{run.final_loss:.6f}" for run in runs))
    table.add_row("seconds", *(f"{run.seconds:.1f}" for run in runs))
    return table


def _why_slower(report: DemoReport) -> Text:
    shared, alone = (1000 * run.seconds / report.num_steps for run in (report.distributed, report.single))
    return Text(
        f"{len(report.workers)} workers are slower here because the network is tiny: one process computes a step in "
        f"{alone:.1f} ms, while the way over the server takes most of their {shared:.1f} ms. What counts here is that "
        "both reach the same result; workers save time once a gradient takes longer to compute than to push."
    )


def _workers(report: DemoReport) -> Table:
    table = Table(title=f"Pushes (a round needs {report.num_required})")
    table.add_column("worker")
    for name in ("in a round", "stale"):
        table.add_column(name, justify="right")
    for worker in report.workers:
        name = f"{worker.worker_id} (slow)" if worker.slow else worker.worker_id
        table.add_row(name, str(worker.contributed), str(worker.stale))
    return table


def _verdict(report: DemoReport) -> Text:
    if report.problem is not None:
        return Text(f"NOT AS EXPECTED: {report.problem}", style="bold red")
    if report.sync_every > 1:
        return Text(
            f"A push every {report.sync_every} steps, a {report.sync_every}th of the traffic; "
            f"the accuracy is that of one process within {ACCURACY_TOLERANCE:.0%}.",
            style="green",
        )
    if report.has_backup:
        stale = sum(worker.stale for worker in report.workers)
        return Text(
            f"{stale} gradients came too late and were left out; "
            f"the accuracy is that of one process within {ACCURACY_TOLERANCE:.0%}.",
            style="green",
        )
    compared = "weights and moving averages" if "moving_mean" in report.single.weights else "weights"
    return Text(
        f"Same result: the {compared} of the two runs differ by at most {report.max_weight_difference:.1e} "
        f"(allowed: {WEIGHT_TOLERANCE:.0e}).",
        style="green",
    )


# Where the runs agree their curves coincide, so one is wide and pale and the other, on top, thin and dark.
_BELOW = {"color": "#f4a261", "linewidth": 5.0, "alpha": 0.75, "solid_capstyle": "round"}
_ABOVE = {"color": "#1d3557", "linewidth": 1.2}


def save_plot(path: Path, distributed: TrainingResult, single: TrainingResult, options: DemoOptions) -> None:
    """Saves the loss and accuracy of two training runs as a PNG image.

    Args:
        path: The file to write.
        distributed: The run with several workers.
        single: The run in one process.
        options: The options of the demo.
    """
    # Drawn without pyplot, which would look for a display and leave global state behind.
    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    workers = f"{options.num_processes} workers, weights on the server"
    if options.backup:
        workers += f", {options.workers} needed"
    if options.diloco:
        workers += f", synchronized every {options.sync_every} steps"

    for run, label, style in ((single, "one process", _BELOW), (distributed, workers, _ABOVE)):
        loss_axes.plot(range(1, len(run.losses) + 1), run.losses, label=label, **style)
        marker = {"marker": "o", "markersize": 3.0} if style is _ABOVE else {}
        accuracy_axes.plot(
            [point.step for point in run.accuracies],
            [100 * point.accuracy for point in run.accuracies],
            label=f"{label}: {run.final_accuracy:.2%}",
            **style,
            **marker,
        )
    loss_axes.set_yscale("log")
    _label(loss_axes, "Loss of the batch", "cross-entropy")
    _label(accuracy_axes, "Accuracy on the test images", "%")
    accuracy_axes.set_ylim(top=100)
    figure.suptitle("Training on handwritten digits")
    figure.savefig(path, format="png")


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
