"""The command line."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from gradserve_demo.command import demo
from gradserve_server.event_loop import new_event_loop
from gradserve_server.garbage import ShortPauses
from gradserve_server.kernels_command import kernels
from gradserve_server.process import allow_many_descriptors, end_process, silence_grpc, switch_threads_often
from gradserve_server.security.command import certificates
from gradserve_server.settings import SettingsError, config_options, make_config, read_settings
from gradserve_server.signals import StopSignals
from gradserve_server.state_command import state

F = TypeVar("F", bound=Callable[..., Any])


def _show_version(context: click.Context, _option: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        import gradserve

        click.echo(f"gradserve, version {gradserve.__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Gradient averaging and gradient ops over gRPC."""


@cli.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="GRADSERVE_CONFIG",
    help="TOML file with settings of the same names as the flags, e.g. max_bytes",
)
@config_options
@click.pass_obj
def serve(signals: StopSignals | None, /, config_path: Path | None, **flags: Any) -> None:
    """Run the server until SIGTERM or SIGINT.

    Each flag is also an environment variable, e.g. GRADSERVE_MAX_BYTES, and an entry of the TOML file, e.g.
    max_bytes = "4GiB".
    """
    settings = read_settings(flags, config_path)
    if "log_level" not in settings or str(settings["log_level"].value).lower() != "debug":
        silence_grpc()
    config = make_config(settings)
    logging.basicConfig(
        level=config.runtime.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("numba").setLevel("INFO")  # its debug log has a megabyte for each kernel
    signals = signals or StopSignals()

    from gradserve.security.certificates import CertificateError
    from gradserve_server.app import Server
    from gradserve_server.devices.host.memory import keep_freed_memory
    from gradserve_server.devices.host.products import use_one_blas_thread
    from gradserve_server.devices.selection import NoSuchDeviceError
    from gradserve_server.errors import ServiceError
    from gradserve_server.security.access_file import AccessFileError
    from gradserve_server.security.tls import setting_of
    from gradserve_server.state.files.errors import DamagedError, StateError

    allow_many_descriptors()
    switch_threads_often()
    keep_freed_memory()
    use_one_blas_thread()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        failures: list[str] = []

        def fail(reason: str) -> None:
            failures.append(reason)
            stop.set()

        server = Server(config, on_failure=fail)
        signals.drain_with(lambda: loop.call_soon_threadsafe(stop.set), config.runtime.drain_seconds)
        async with server:
            with ShortPauses() as pauses:
                looking = asyncio.create_task(pauses.look_at_all())
                await stop.wait()
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
        if failures:
            raise click.ClickException(failures[0])

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run())
    except CertificateError as error:
        name = setting_of(error)
        source = settings[name].source if name in settings else f"--{name.replace('_', '-')}"
        raise SettingsError(f"{source}: {error}") from None
    except NoSuchDeviceError as error:
        raise click.ClickException(f"{settings[error.setting].source}: {error}") from None
    except AccessFileError as error:
        raise SettingsError(f"{settings['access'].source}: {error}") from None
    except DamagedError as error:
        raise click.ClickException(
            f"{error}; `gradserve state check` lists all that is damaged, `gradserve state repair` removes it"
        ) from None
    except (OSError, StateError, ServiceError) as error:
        raise click.ClickException(str(error)) from None
    end_process()


_address = click.argument("address", default="localhost:50051", envvar="GRADSERVE_ADDRESS")
_timeout = click.option("--timeout", type=float, default=5.0, show_default=True, help="seconds to wait at most, or inf")
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


def _with_tls(command: F) -> F:
    for option in reversed(_TLS_OPTIONS):
        command = option(command)
    return command


def _tls(*, uses_tls: bool, tls_ca: str | None, tls_client_certificate: str | None, tls_client_key: str | None) -> Any:
    """Returns the `gradserve.TLS` of the flags, None for none."""
    import gradserve

    if not (uses_tls or tls_ca or tls_client_certificate or tls_client_key):
        return None
    return gradserve.TLS(tls_ca or None, tls_client_certificate or None, tls_client_key or None)


@cli.command()
@_address
@_timeout
@_with_tls
def health(address: str, timeout: float, **tls: Any) -> None:
    """Exit with 0 if the server at ADDRESS serves, otherwise with 1."""
    silence_grpc()
    import gradserve
    from gradserve_server.rpc.health.check import check_health

    try:
        status = check_health(address, timeout, _tls(**tls))
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    if status != "SERVING":
        raise click.ClickException(f"{address}: {status}")
    click.echo(f"{address}: {status}")


@cli.command()
@_address
@_timeout
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the names of gradserve.ServerInfo.")
@_with_tls
def info(address: str, timeout: float, as_json: bool, **tls: Any) -> None:
    """Show version, devices, limits and load of the server at ADDRESS."""
    silence_grpc()
    import gradserve

    try:
        with gradserve.connect(address, timeout=timeout, tls=_tls(**tls)) as client:
            description = client.server_info()
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    except gradserve.GradserveError as error:
        raise click.ClickException(f"{address}: {error}") from None
    if as_json:
        click.echo(json.dumps(asdict(description), indent=2))
        return
    click.echo(f"gradserve {description.version}, up {description.uptime:.0f} s")
    for device in description.devices:
        runs_ops = _ops_state(description.ops_prepared) if device.name == description.device else ""
        click.echo(f"  {device.name}: {device.description}, {device.total_memory_bytes / 2**30:.1f} GiB{runs_ops}")
    if description.why_no_gpu:
        click.echo(f"  no GPU: {description.why_no_gpu}")
    reason = description.transport.why_not_faster
    click.echo(f"calls from here take: {description.transport.way}" + (f" ({reason})" if reason else ""))
    figures = [("limits", description.limits), ("in use", description.usage)]
    if description.device_usage:
        figures.append((description.device, description.device_usage))
    for title, values in figures:
        click.echo(f"{title}:")
        for name, value in values.items():
            click.echo(f"  {name}: {value:,}")
    for title, shares in (("identity", description.identities), ("container", description.containers)):
        if shares:
            click.echo(f"in use by {title}:")
        for name, share in shares.items():
            used = ", ".join(f"{what} {value:,}" for what, value in share.items() if value)
            click.echo(f"  {name}: {used or 'nothing'}")


@cli.command()
@click.argument("name", default="NAME")
def token(name: str) -> None:
    """Make a bearer token for the identity NAME; print it, and its lines for the access file of the server."""
    from gradserve_server.security.access_file import DIGEST_PREFIX
    from gradserve_server.security.credentials import digest_of, new_token

    made, key = new_token(), name if name.replace("-", "_").isidentifier() else json.dumps(name)
    lines = (
        "# For the client alone: GRADSERVE_TOKEN, or connect(..., token=)",
        made,
        "",
        "# For the server's access file",
        f"[identities.{key}]",
        f'tokens = ["{DIGEST_PREFIX}{digest_of(made).hex()}"]',
        'roles = { "*" = "worker" }',
    )
    click.echo("\n".join(lines))


def _ops_state(prepared: bool) -> str:
    return ", runs ops" if prepared else ", runs ops, kernels not loaded yet"


cli.add_command(certificates)
cli.add_command(demo)
cli.add_command(kernels)
cli.add_command(state)
