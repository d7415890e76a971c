"""`gradserve rm`: deletes what is on a server."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.as_json import echo_json, json_option
from gradserve_server.commands.kinds import ACCUMULATORS, LAYERS, Kind, container_option
from gradserve_server.commands.names import complete_names
from gradserve_server.commands.server_address import connected, server_options

if TYPE_CHECKING:
    import gradserve


@click.command()
@click.argument("kind", type=Kind())
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)
@container_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@server_options
def rm(
    kind: str,
    names: Sequence[str],
    address: str,
    timeout: float,
    container: str,
    yes: bool,
    as_json: bool,
    **tls: Any,
) -> None:
    """Delete accumulators or layers by name, or tensors by handle.

    Whoever waits on an accumulator gets an error. Exits with 1 if something was not there; the rest is deleted.
    """
    if not yes:
        what = kind.removesuffix("s") if len(names) == 1 else f"{len(names)} {kind}"
        click.confirm(f"Delete {what} {', '.join(names)} of {address}?", abort=True, err=True)
    deleted: dict[str, bool] = {}
    try:
        with connected(address, timeout, **tls) as client:
            for name in dict.fromkeys(names):
                deleted[name] = _delete(client, kind, name, container)
                if deleted[name] and not as_json:
                    click.echo(f"deleted {name}")
    finally:
        if as_json:  # what was deleted before a call has failed, too
            echo_json({"deleted": deleted})
    missing = [name for name, was_there in deleted.items() if not was_there]
    if missing:
        raise click.ClickException(f"no {kind} {', '.join(missing)} on {address}")


def _delete(client: "gradserve.Client", kind: str, name: str, container: str) -> bool:
    if kind == ACCUMULATORS:
        return client.delete_accumulator(name, container)
    if kind == LAYERS:
        return client.delete_batch_norm_layer(name, container)
    found = [each for each in client.list_tensors() if each.handle == name]
    return bool(client.delete(*found)) if found else False
