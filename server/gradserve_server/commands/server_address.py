"""The server that a command talks to: its address, TLS, and what becomes of errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from gradserve_server.config.settings import SettingsError
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_ADDRESS = "localhost:50051"
_ARGUMENT, _OPTION = "gradserve_protocol.address.argument", "gradserve_protocol.address.option"
"""Where the callbacks of a command keep what was given as ADDRESS and as --address."""


def keep_address_argument(context: click.Context, address: str) -> None:
    """Takes a word of the command line for its ADDRESS, for `with_address` to find."""
    context.meta[_ARGUMENT] = address


def _keep_option(context: click.Context, _option: click.Parameter, address: str | None) -> None:
    context.meta[_OPTION] = address


def _chosen(context: click.Context, option: click.Parameter, argument: str | None) -> str:
    argument = argument or context.meta.get(_ARGUMENT)
    given = context.meta.get(_OPTION)
    if argument is None:
        return given or DEFAULT_ADDRESS
    is_from_command_line = context.get_parameter_source(_OPTION_NAME) is ParameterSource.COMMANDLINE
    if is_from_command_line and given != argument and not context.resilient_parsing:
        raise click.UsageError(f"expected one address, got {argument!r} as ADDRESS and {given!r} as --address", context)
    return argument


_OPTION_NAME = "given_address"
_ADDRESS_ARGUMENT = click.argument("address", required=False, callback=_chosen)
_ABOUT_OPTION: dict[str, Any] = {
    "metavar": "ADDRESS",
    "envvar": "GRADSERVE_ADDRESS",
    "help": "the server: HOST:PORT or unix:PATH; or all servers of a cluster: with commas between them, "
    f"dns+srv://SERVICE or gradserve+ray://NAME  [default: {DEFAULT_ADDRESS}]",
}
_ADDRESS_OPTION = click.option(
    "--address", "-a", _OPTION_NAME, is_eager=True, expose_value=False, callback=_keep_option, **_ABOUT_OPTION
)
address_option = click.option("--address", "-a", default=DEFAULT_ADDRESS, **_ABOUT_OPTION)
"""--address alone, for a command whose last argument takes any number of words."""
_TIMEOUT_OPTION = click.option(
    "--timeout", type=float, default=5.0, show_default=True, help="seconds to wait at most, or inf"
)
_TLS_OPTIONS = (
    click.option(
        "--tls", "uses_tls", is_flag=True, envvar="GRADSERVE_TLS", help="use TLS, with the authorities of the system"
    ),
    click.option(
        "--tls-ca",
        metavar="FILE",
        envvar="GRADSERVE_TLS_CA",
        help="use TLS, with the authorities whose certificates are in the file",
    ),
    click.option(
        "--tls-client-certificate",
        metavar="FILE",
        envvar="GRADSERVE_TLS_CLIENT_CERTIFICATE",
        help="use TLS, and show this certificate to the server",
    ),
    click.option(
        "--tls-client-key",
        metavar="FILE",
        envvar="GRADSERVE_TLS_CLIENT_KEY",
        help="the private key of the certificate",
    ),
)


def connection_options(command: F) -> F:
    """Gives a command the options --timeout and --tls..., for `connected` and `tls_of`."""
    for option in (*reversed(_TLS_OPTIONS), _TIMEOUT_OPTION):
        command = option(command)
    return command


def server_options(command: F) -> F:
    """Gives a command the argument ADDRESS, the option --address for the same, and those of `connection_options`.

    The command has one parameter `address` for both. Without either, it is that of GRADSERVE_ADDRESS, or the default.
    """
    return _ADDRESS_ARGUMENT(_ADDRESS_OPTION(connection_options(command)))


def tls_of(
    *, uses_tls: bool, tls_ca: str | None, tls_client_certificate: str | None, tls_client_key: str | None
) -> "gradserve.TLS | None":
    """Returns the `gradserve.TLS` of the options, None for none.

    Raises:
        SettingsError: The options do not go together.
    """
    import gradserve

    if not (uses_tls or tls_ca or tls_client_certificate or tls_client_key):
        return None
    try:
        return gradserve.TLS(tls_ca or None, tls_client_certificate or None, tls_client_key or None)
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None


@contextmanager
def connected(address: str, timeout: float, **options: Any) -> Iterator["gradserve.Client"]:
    """Connects to a server, and turns errors of its client into messages of one line.

    Args:
        address: The address.
        timeout: Seconds that each call waits.
        **options: The TLS options; others go to `gradserve.connect`.

    Raises:
        SettingsError: The address or an option is not valid.
        click.ClickException: A call has failed.
    """
    silence_grpc()
    import gradserve

    tls = {name: options.pop(name) for name in list(options) if name == "uses_tls" or name.startswith("tls_")}
    try:
        with gradserve.connect(address, timeout=timeout, tls=tls_of(**tls), **options) as client:
            yield client
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    except gradserve.GradserveError as error:
        raise click.ClickException(f"{address}: {error}") from None
