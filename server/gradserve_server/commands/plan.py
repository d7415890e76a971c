"""`gradserve plan`: how many servers a training run needs, and what to expect of them."""

import math
import re
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.wording import duration, echo_json, json_option, size, table, tell

if TYPE_CHECKING:
    from gradserve_server.commands.planning import Choice

_MOST_SERVERS = 1000
_BYTES = {
    "": 1,
    "b": 1,
    **{
        f"{unit}{ending}": base**power
        for power, unit in enumerate("kmgt", 1)
        for ending, base in (("b", 1000), ("ib", 1024))
    },
}
_BITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0}


class _Quantity(click.ParamType[float]):
    """A number with a unit."""

    def __init__(self, name: str, units: dict[str, float], example: str) -> None:
        self.name = name
        self._units = units
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the number in the base unit."""
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)(?:/s)?\s*", value.lower())
        if found is None or found[2] not in self._units:
            self.fail(f"expected a number with a unit, such as {self._example}, got {value!r}", param, ctx)
        return float(found[1]) * self._units[found[2]]


_SIZE = _Quantity("size", _BYTES, "500MB or 2GiB")
_RATE = _Quantity("rate", {unit: bits / 8 for unit, bits in _BITS.items()}, "10Gbit")
_TIME = _Quantity("time", _SECONDS, "40ms or 2.5s")


@click.command()
@click.option("--model-bytes", type=_SIZE, required=True, help="size of a gradient of the whole model, e.g. 500MB")
@click.option("--workers", type=click.IntRange(1, 1_000_000), required=True, help="number of workers")
@click.option("--required", type=click.IntRange(1), help="gradients in a round  [default: all workers]")
@click.option("--bandwidth", type=_RATE, required=True, help="bandwidth of each server, e.g. 10Gbit")
@click.option("--worker-bandwidth", type=_RATE, help="bandwidth of each worker  [default: no limit]")
@click.option("--latency", type=_TIME, default="0ms", show_default=True, help="round trip to the servers, e.g. 40ms")
@click.option("--compute", type=_TIME, default="0s", show_default=True, help="time a worker computes between rounds")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 2),
    default=0.0,
    show_default=True,
    help="how much that time varies: 0.1 means that one step in six takes 10 % longer",
)
@click.option(
    "--workers-per-host",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="workers on each host, which share an aggregator if there are several; --worker-bandwidth is then the host's",
)
@click.option("--servers", type=click.IntRange(1, _MOST_SERVERS), help="the most servers to look at  [default: 64]")
@json_option
def plan(
    model_bytes: float,
    workers: int,
    required: int | None,
    bandwidth: float,
    worker_bandwidth: float | None,
    latency: float,
    compute: float,
    jitter: float,
    workers_per_host: int,
    servers: int | None,
    as_json: bool,
) -> None:
    """Print how many servers a training run needs, and what to expect of them.

    Simulates rounds on 1, 2, 4, ... servers, with the model in accumulators spread evenly over them.
    """
    from gradserve_server.commands.planning import Deployment, advise, compare, sizes_up_to

    if model_bytes <= 0 or bandwidth <= 0 or (worker_bandwidth is not None and worker_bandwidth <= 0):
        raise click.UsageError("--model-bytes and bandwidths have to be more than 0")
    if required is not None and required > workers:
        raise click.UsageError(f"--required {required} is more than --workers {workers}: no round would end")
    deployment = Deployment(
        model_bytes=model_bytes,
        num_workers=workers,
        num_required=required or workers,
        num_servers=1,
        server_bandwidth=bandwidth,
        worker_bandwidth=worker_bandwidth or math.inf,
        round_trip=latency,
        compute_seconds=compute,
        jitter=jitter,
        workers_per_host=workers_per_host,
    )
    choices = compare(deployment, sizes_up_to(servers or 64))
    best = advise(choices)
    if as_json:
        echo_json({"deployment": deployment, "choices": choices, "num_servers": best.num_servers})
        return
    tell(*table(_HEADER, [_row(choice, is_best=choice is best) for choice in choices], frozenset({0, 1, 2, 3, 4})))
    tell("", *_advice(best, choices[-1]))
    if workers_per_host > 1:
        tell(f"Workers: gradserve.connect(ADDRESS, local_aggregator={workers_per_host})")


_HEADER = ("servers", "round", "computing", "stale", "into each server", "")


def _row(choice: "Choice", *, is_best: bool) -> tuple[str, ...]:
    of = choice.forecast
    return (
        f"{choice.num_servers}",
        duration(of.round_seconds),
        f"{100 * of.computing:.0f} %",
        f"{100 * of.stale:.0f} %",
        size(of.server_bytes),
        "<- enough" if is_best else "",
    )


def _advice(best: "Choice", largest: "Choice") -> list[str]:
    if best.num_servers == 1:
        return ["Run one server: with two, a round would take hardly less time."]
    why = "with twice as many, a round would take hardly less time"
    if best is largest:
        why = "more would still make rounds faster; look further with --servers"
    return [
        f"Run {best.num_servers} servers ({why}), each with its own number I, and spread the model evenly over them:",
        f"gradserve serve --listen 0.0.0.0:50051 --cluster NAME --cluster-index I --cluster-size {best.num_servers}",
    ]
