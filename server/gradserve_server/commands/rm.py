"""`gradserve rm`: deletes what is on servers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.kinds import ACCUMULATORS, LAYERS, Kind, complete_names, container_option
from gradserve_server.commands.servers import (
    Answer,
    address_option,
    ask_one,
    connected,
    connection_options,
    servers_at,
    tls_of,
)
from gradserve_server.commands.wording import echo_json, json_option, tell
from gradserve_server.limits import visible
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve


@click.command()
@click.argument("kind", type=Kind())
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)
@container_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@address_option
@connection_options
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
        click.confirm(visible(f"Delete {what} {', '.join(names)} of {address}?"), abort=True, err=True)
    silence_grpc()
    servers = servers_at(address, timeout)
    deleted: dict[str, bool] = {}
    problems: list[str] = []
    try:
        with connected(address, timeout, **tls) as client:
            for name in dict.fromkeys(names):
                if len(servers) == 1:
                    deleted[name] = _delete(client, kind, name, container)
                else:
                    found = _delete_in_cluster(client, servers, kind, name, container, timeout, tls_of(**tls))
                    silent = [each for each in found if each.problem]
                    problems += [f"server {each.index} at {each.address}: {each.problem}" for each in silent]
                    was_there = any(each.value for each in found)
                    if was_there or not silent:  # Otherwise nobody knows.
                        deleted[name] = was_there
                if deleted.get(name) and not as_json:
                    tell(f"deleted {name}")
    finally:
        if as_json:  # what was deleted before a call has failed, too
            echo_json({"deleted": deleted})
    missing = [name for name, was_there in deleted.items() if not was_there]
    if missing:
        problems.append(f"no {kind} {', '.join(missing)} on {address}")
    if problems:
        raise click.ClickException("\n".join(dict.fromkeys(problems)))


def _delete_in_cluster(
    client: "gradserve.Client",
    servers: Sequence[str],
    kind: str,
    name: str,
    container: str,
    timeout: float,
    tls: "gradserve.TLS | None",
) -> list[Answer[bool]]:
    """Deletes an accumulator through its home, and anything else from whatever server has it."""
    if kind != ACCUMULATORS:
        return [
            ask_one(servers, index, timeout, tls, lambda server: _delete(server, kind, name, container))
            for index in range(len(servers))
        ]
    from gradserve_protocol.placement import home_of  # not before silence_grpc: it imports gRPC

    home = home_of(container, name, len(servers))
    return [ask_one(servers, home, timeout, tls, lambda _: client.delete_accumulator(name, container))]


def _delete(client: "gradserve.Client", kind: str, name: str, container: str) -> bool:
    if kind == ACCUMULATORS:
        return client.delete_accumulator(name, container)
    if kind == LAYERS:
        return client.delete_batch_norm_layer(name, container)
    found = [each for each in client.list_tensors() if each.handle == name]
    return bool(client.delete(*found)) if found else False
