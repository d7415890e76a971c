"""`gradserve info`: shows version, devices, limits and load of a server."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.as_json import echo_json
from gradserve_server.commands.server_address import address_argument, connected, connection_options
from gradserve_server.commands.wording import duration, figure, size

if TYPE_CHECKING:
    import gradserve


@click.command()
@address_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the names of gradserve.ServerInfo.")
@connection_options
def info(address: str, timeout: float, as_json: bool, **tls: Any) -> None:
    """Show version, devices, limits and load of the server at ADDRESS."""
    with connected(address, timeout, **tls) as client:
        description = client.server_info()
    if as_json:
        echo_json(description)
        return
    _show(description)


def _show(description: "gradserve.ServerInfo") -> None:
    click.echo(f"gradserve {description.version}, up {duration(description.uptime)}")
    for device in description.devices:
        runs_ops = _ops_state(description.ops_prepared) if device.name == description.device else ""
        click.echo(f"  {device.name}: {device.description}, {size(device.total_memory_bytes)}{runs_ops}")
    if description.why_no_gpu:
        click.echo(f"  no GPU: {description.why_no_gpu}")
    reason = description.transport.why_not_faster
    click.echo(f"calls from here take: {description.transport.way}" + (f" ({reason})" if reason else ""))
    if description.http_url:
        click.echo(f"status page: {description.http_url}")
    figures = [("limits", description.limits), ("in use", description.usage)]
    if description.device_usage:
        figures.append((description.device, description.device_usage))
    for title, values in figures:
        click.echo(f"{title}:")
        for name, value in values.items():
            click.echo(f"  {name}: {figure(name, value)}")
    for title, shares in (("identity", description.identities), ("container", description.containers)):
        if shares:
            click.echo(f"in use by {title}:")
        for name, share in shares.items():
            click.echo(f"  {name}: {_share(share)}")


def _share(share: Mapping[str, int]) -> str:
    used = ", ".join(f"{what} {figure(what, value)}" for what, value in share.items() if value)
    return used or "nothing"


def _ops_state(prepared: bool) -> str:
    return ", runs ops" if prepared else ", runs ops, kernels not loaded yet"
