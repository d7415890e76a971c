"""The plot at the end of the demo: loss and accuracy of both runs."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradserve_demo.report import TrainingResult

# Where the runs agree their curves coincide, so one is wide and pale and the other, on top, thin and dark.
_BELOW = {"color": "#f4a261", "linewidth": 5.0, "alpha": 0.75, "solid_capstyle": "round"}
_ABOVE = {"color": "#1d3557", "linewidth": 1.2}


def save_plot(
    path: Path, distributed: TrainingResult, single: TrainingResult, *, num_workers: int, num_required: int
) -> None:
    """Saves the loss and accuracy of two training runs as a PNG image.

    Args:
        path: The file to write.
        distributed: The run with several workers.
        single: The run in one process.
        num_workers: Workers in the distributed run.
        num_required: Gradients that completed one of its rounds.
    """
    # Drawn without pyplot, which would look for a display and leave global state behind.
    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    workers = f"{num_workers} workers through an accumulator"
    if num_workers > num_required:
        workers += f", {num_required} needed"

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
