"""`gradserve health`: asks a server whether it serves."""

from typing import Any

import click

from gradserve_server.commands.server_address import address_argument, connection_options, tls_of
from gradserve_server.process import silence_grpc
from gradserve_server.settings import SettingsError


@click.command()
@address_argument
@connection_options
def health(address: str, timeout: float, **tls: Any) -> None:
    """Exit with 0 if the server at ADDRESS serves, otherwise with 1."""
    silence_grpc()
    import gradserve
    from gradserve_server.rpc.health.check import check_health

    try:
        status = check_health(address, timeout, tls_of(**tls))
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    if status != "SERVING":
        raise click.ClickException(f"{address}: {status}")
    click.echo(f"{address}: {status}")
