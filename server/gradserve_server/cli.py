"""The command line."""

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import click

import gradserve
from gradserve_server.demo.command import demo
from gradserve_server.devices.selection import NoSuchDeviceError
from gradserve_server.settings import config_options, load_config


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gradserve.__version__)
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
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="GRADSERVE_LOG_LEVEL",
    show_default=True,
)
@config_options
def serve(config_path: Path | None, log_level: str, **flags: Any) -> None:
    """Run the server until SIGTERM or SIGINT.

    Each flag is also an environment variable, e.g. GRADSERVE_MAX_BYTES, and an entry of the TOML file, e.g.
    max_bytes = "4GiB".
    """
    from gradserve_server.app import Server
    from gradserve_server.devices.memory import keep_freed_memory
    from gradserve_server.devices.products import use_one_blas_thread

    config = load_config(flags, config_path)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keep_freed_memory()
    use_one_blas_thread()

    async def run() -> None:
        async with Server(config) as server:
            # What is there now stays: the garbage collector need not look at it again and again.
            gc.freeze()
            await server.run_until_signal()

    try:
        asyncio.run(run())
    except (OSError, NoSuchDeviceError) as error:
        raise click.ClickException(str(error)) from None


_address = click.argument("address", default="localhost:50051", envvar="GRADSERVE_ADDRESS")
_timeout = click.option("--timeout", type=float, default=5.0, show_default=True, help="seconds to wait at most, or inf")


@cli.command()
@_address
@_timeout
def health(address: str, timeout: float) -> None:
    """Exit with 0 if the server at ADDRESS serves, else with 1."""
    from gradserve_server.rpc.health_check import check_health

    status = check_health(address, timeout)
    if status != "SERVING":
        raise click.ClickException(f"{address}: {status}")
    click.echo(f"{address}: {status}")


@cli.command()
@_address
@_timeout
def info(address: str, timeout: float) -> None:
    """Show version, devices, limits and load of the server at ADDRESS."""
    try:
        with gradserve.connect(address, timeout=timeout) as client:
            description = client.server_info()
    except gradserve.GradserveError as error:
        raise click.ClickException(f"{address}: {error}") from None
    click.echo(f"gradserve {description.version}, up {description.uptime:.0f} s")
    for device in description.devices:
        runs_ops = _ops_state(description.ops_prepared) if device.name == description.device else ""
        click.echo(f"  {device.name}: {device.description}, {device.total_memory_bytes / 2**30:.1f} GiB{runs_ops}")
    for title, values in (("limits", description.limits), ("in use", description.usage)):
        click.echo(f"{title}:")
        for name, value in values.items():
            click.echo(f"  {name}: {value:,}")


def _ops_state(prepared: bool) -> str:
    return ", runs ops" if prepared else ", runs ops, their kernels are not loaded yet"


cli.add_command(demo)
