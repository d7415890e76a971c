"""`gradserve health`: asks a server whether it serves."""

from typing import Any

import click

from gradserve_server.commands.as_json import echo_json, json_option
from gradserve_server.commands.server_address import address_argument, connection_options, tls_of
from gradserve_server.process import silence_grpc
from gradserve_server.settings import SettingsError


@click.command()
@address_argument
@json_option
@connection_options
def health(address: str, timeout: float, as_json: bool, **tls: Any) -> None:
    """Exit with 0 if the server at ADDRESS serves, otherwise with 1."""
    silence_grpc()
    import gradserve
    from gradserve_server.rpc.health.check import check_health

    try:
        status = check_health(address, timeout, tls_of(**tls))
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    serves = status == "SERVING"
    if as_json:
        code, _, reason = status.partition(": ")
        echo_json({"address": address, "serves": serves, "status": code, "reason": reason})
        click.get_current_context().exit(0 if serves else 1)
    if not serves:
        raise click.ClickException(f"{address}: {status}")
    click.echo(f"{address}: {status}")
