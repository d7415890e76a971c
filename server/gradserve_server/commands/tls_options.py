"""The options about TLS of all commands that talk to a server. Imports little, for `gradserve run`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gradserve_protocol.variables import TLS_FILE_VARIABLES, TLS_VARIABLE

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--tls", "uses_tls", is_flag=True, envvar=TLS_VARIABLE, help="use TLS, with the authorities of the system"
    ),
    click.option(
        "--tls-ca",
        metavar="FILE",
        envvar=TLS_FILE_VARIABLES["ca"],
        help="use TLS, with the authorities whose certificates are in the file",
    ),
    click.option(
        "--tls-client-certificate",
        metavar="FILE",
        envvar=TLS_FILE_VARIABLES["certificate"],
        help="use TLS, and show this certificate to the server",
    ),
    click.option(
        "--tls-client-key",
        metavar="FILE",
        envvar=TLS_FILE_VARIABLES["key"],
        help="the private key of the certificate",
    ),
)


def tls_options(command: F) -> F:
    """Gives a command the options --tls... as `uses_tls`, `tls_ca`, `tls_client_certificate` and `tls_client_key`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
