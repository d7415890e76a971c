"""`gradserve ls`: lists what is on a server."""

from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.as_json import echo_json, json_option
from gradserve_server.commands.kinds import ACCUMULATORS, LAYERS, TENSORS, Kind
from gradserve_server.commands.server_address import connected, server_options
from gradserve_server.commands.wording import size, table

if TYPE_CHECKING:
    import gradserve

_MOST_ACCUMULATORS = 1000


@click.command()
@click.argument("kind", type=Kind(), default=ACCUMULATORS)
@click.option("--container", metavar="NAME", default="", help="only what is in this container")
@click.option("--name", metavar="TEXT", default="", help="only accumulators or layers whose names contain this")
@json_option
@server_options
def ls(kind: str, address: str, timeout: float, container: str, name: str, as_json: bool, **tls: Any) -> None:
    """List the accumulators of a server, its layers, or its stored tensors.

    Accumulators and layers are those of all containers in which you have a role. Tensors are not in containers.
    """
    if kind == TENSORS and (container or name):
        raise click.UsageError("--container and --name are for accumulators and layers; tensors have neither")
    with connected(address, timeout, **tls) as client:
        if kind == TENSORS:
            tensors = client.list_tensors()
            _show_all({TENSORS: tensors}, as_json, _tensors(tensors))
            return
        status = client.server_status(
            container=container, name_contains=name, order="name", max_accumulators=_MOST_ACCUMULATORS, max_rounds=1
        )
    if kind == LAYERS:
        found = {LAYERS: status.layers, "num_layers": status.num_layers}
        _show_all(found, as_json, _layers(status.layers))
        missing = status.num_layers - len(status.layers)
    else:
        found = {ACCUMULATORS: status.accumulators, "num_accumulators": status.num_accumulators}
        _show_all(found, as_json, _accumulators(status.accumulators))
        missing = status.num_accumulators - len(status.accumulators)
    if missing > 0:
        click.echo(f"and {missing:,} more; choose with --container or --name", err=True)


def _show_all(found: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        echo_json(found)
    elif any(found.values()):
        click.echo(text)
    else:
        click.echo(f"no {next(iter(found))}")


def _accumulators(found: "tuple[gradserve.server_status.AccumulatorStatus, ...]") -> str:
    header = ("CONTAINER", "NAME", "STEP", "ROUNDS/S", "IN ROUND", "WAITING", "STALE", "MEMORY")
    rows = [
        (
            each.container,
            each.name,
            str(each.global_step),
            f"{each.rounds_per_second:.1f}",
            f"{each.num_accumulated} of {each.num_required}" if each.num_required else str(each.num_accumulated),
            str(each.num_waiting),
            str(each.stale),
            size(each.num_bytes),
        )
        for each in found
    ]
    return table(header, rows, frozenset({2, 3, 4, 5, 6, 7}))


def _layers(found: "tuple[gradserve.server_status.LayerStatus, ...]") -> str:
    rows = [(each.container, each.name, str(each.num_forwards), size(each.num_bytes)) for each in found]
    return table(("CONTAINER", "NAME", "FORWARDS", "MEMORY"), rows, frozenset({2, 3}))


def _tensors(found: "list[gradserve.TensorHandle]") -> str:
    rows = []
    for each in found:
        num_bytes = each.dtype.itemsize
        for length in each.shape:
            num_bytes *= length
        rows.append((each.handle, str(each.dtype), str(list(each.shape)), size(num_bytes)))
    return table(("HANDLE", "DTYPE", "SHAPE", "SIZE"), rows, frozenset({3}))
