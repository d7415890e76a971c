"""The page on performance: the newest measurement of each comparison, drawn."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.site.performance.chart import as_svg
from deploy.site.performance.measurements import Measurement, newest_measurements
from deploy.site.places import place_of

_INTRODUCTION = """\
# Performance

Time per step of gradserve (filled) and of its peers (hollow): the median of the repetitions, with their middle half as
a line, on a logarithmic axis. All ran on a small virtual machine whose speed changes with its neighbours: compare
within a picture, not between pictures. [Benchmarks](benchmarks.md) says how it is measured, what was missed and why,
and how to measure on your machine; the numbers here come from its result files.
"""


@dataclass(frozen=True)
class _Group:
    """Comparisons about one thing, by how their titles begin."""

    heading: str
    about: str
    titles: tuple[str, ...]


_GROUPS = (
    _Group(
        "One number for all: push_pull",
        "Every worker adds its gradient and gets the average, in one call. gloo reduces between the workers, and has no"
        " server.",
        ("push_pull of ", "ResNet-50 gradients, 4 workers, push_pull"),
    ),
    _Group(
        "Rounds",
        "Each worker applies a gradient, one takes the average; beside TensorFlow's accumulators and a naive service.",
        (
            "round of 2 workers, 4 KB",
            "round of 2 workers, 10 MB",
            "round of 2 workers, 100 MB",
            "round of 4 workers, 10 MB",
            "round of 4 workers, 100 MB",
        ),
    ),
    _Group(
        "Training steps in PyTorch",
        "Whole steps of a ResNet-18: forward, backward, averaging, SGD.",
        ("ResNet-18 in PyTorch",),
    ),
    _Group("Uploads and downloads", "One array to the server, or back.", ("put 10", "get 10")),
    _Group(
        "Over links",
        "Rounds over links with little bandwidth, and long ones, beside raw sockets that move as many bytes.",
        (
            "round of 2 workers, 1 MB, over",
            "round of 2 workers, 10 MB, over",
            "round of 2 workers, 50 MB, over",
            "round of one",
        ),
    ),
    _Group("Durability", "Rounds whose gradients, or averages, survive a crash.", ("durable round", "4 durable")),
    _Group("Batch normalization", "Forward and gradient, beside TensorFlow's and PyTorch's kernels.", ("batch norm",)),
    _Group("Recurrent networks", "GRU cells and whole networks.", ("GRU", "CudnnRNN")),
)


def write_performance(page: Path) -> None:
    """Writes the page."""
    measurements = newest_measurements()
    parts = [_INTRODUCTION]
    for group in _GROUPS:
        parts += [f"## {group.heading}", group.about, '<div class="gs-charts" markdown="0">']
        parts[-1] += "".join(_figure(each) for each in _of(group, measurements)) + "</div>"
    page.write_text("\n\n".join(parts) + "\n")


def _of(group: _Group, measurements: tuple[Measurement, ...]) -> Iterator[Measurement]:
    for title in group.titles:
        for each in measurements:
            exact = each.title == title if title[-1] == "B" else each.title.startswith(title)
            if exact and not any(contestant.label == "before" for contestant in each.contestants):
                yield each


def _figure(each: Measurement) -> str:
    source = f'{each.date}, {each.repeats} repetitions, {each.machine}; <a href="{place_of(each.file)}">all numbers</a>'
    return f"<figure><h3>{each.title}</h3>\n{as_svg(each)}\n<figcaption>{source}</figcaption></figure>\n"
