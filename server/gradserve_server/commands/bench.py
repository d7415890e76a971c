"""`gradserve bench`: how fast a server answers from here."""

import contextlib
from typing import Any

import click

from gradserve_server.commands.servers import connected, server_options
from gradserve_server.commands.wording import echo_json, json_option, steps

_WAYS = ("shared_memory", "bulk", "grpc")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Size(click.ParamType[int]):
    """A size in bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the number of bytes, a multiple of 4."""
        if isinstance(value, int):
            return value
        unit = next((each for each in _UNITS if value.endswith(each)), "")
        num_bytes = 0
        with contextlib.suppress(ValueError, OverflowError):
            num_bytes = int(float(value.removesuffix(unit)) * _UNITS.get(unit, 1)) // 4 * 4
        if not 4096 <= num_bytes <= _UNITS["GiB"]:
            self.fail(f"expected a size from 4KiB to 1GiB, such as 10MiB, got {value!r}", param, ctx)
        return num_bytes


@click.command()
@click.option("--size", "num_bytes", type=Size(), default="10MiB", show_default=True, help="the size of large tensors")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    default=1.0,
    show_default=True,
    help="how long each figure is measured: four for each way, and two of this machine",
)
@click.option(
    "--transport",
    "--way",
    "ways",
    multiple=True,
    type=click.Choice(_WAYS),
    help="only this way, as transport= of gradserve.connect; repeatable",
)
@click.option("--container", metavar="NAME", default="", help="where to make accumulators  [default: default]")
@json_option
@server_options
def bench(
    address: str,
    timeout: float,
    num_bytes: int,
    seconds: float,
    ways: tuple[str, ...],
    container: str,
    as_json: bool,
    **tls: Any,
) -> None:
    """Measure how fast the server at ADDRESS answers from here, by each way, beside what this machine can do.

    Times are measured at this client, beside other work of the server and the machine. What the benchmark makes
    on the server is deleted at its end.
    """
    from gradserve_server.commands.benchmark import BenchResult, Way, measure_host, measure_way

    with connected(address, timeout, **tls) as client:
        client.server_info()  # so that a server that is not there is an error, not a way that is not possible
    found = []
    wanted = [way for way in _WAYS if way in ways] or list(_WAYS)
    with steps("measuring", len(wanted) + 1, as_json=as_json) as next_step:
        for way in wanted:
            try:
                with connected(address, timeout, transport=way, **tls) as client:
                    found.append(measure_way(client, way, num_bytes, seconds, container))
            except click.ClickException as error:
                found.append(Way(way, why_not=error.message.removeprefix(f"{address}: ")))
            next_step()
        host = measure_host(num_bytes, seconds)
        next_step()
    result = BenchResult(address, num_bytes, tuple(found), host)
    if as_json:
        echo_json(result)
    else:
        click.echo(result.text())
    if all(each.why_not for each in found):
        raise click.ClickException(f"{address}: no way could be measured")
