"""`gradserve cluster up`: starts servers on Ray."""

from pathlib import Path

import click

from gradserve_server.commands.cluster.ray_address import ray_address_option, ray_errors
from gradserve_server.commands.wording import tell
from gradserve_server.config.settings import Setting, SettingsError, make_config

_OURS = ("--address-file", "--cluster", "--listen", "--rounds-file", "--state-dir")
"""Flags of servers that the cluster decides, and those that begin with them."""

DEFAULT_NAME = "gradserve"


@click.command()
@click.option("--servers", type=click.IntRange(min=1), required=True, help="The number of servers.")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="The name of the cluster.")
@click.option(
    "--gpus-per-server", type=click.FloatRange(min=0), default=0.0, show_default=True, help="The GPUs that each has."
)
@click.option(
    "--cpus-per-server",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="The CPUs of Ray that each reserves.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Existing folder of the state directories, PATH/0, PATH/1 and so on, which all nodes must reach; "
    "without it, what is on a server ends with it.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds in which all servers must serve.",
)
@ray_address_option
@click.argument("flags", metavar="[-- FLAG...]", nargs=-1, type=click.UNPROCESSED)
def up(
    servers: int,
    name: str,
    gpus_per_server: float,
    cpus_per_server: float,
    state_dir: Path | None,
    timeout: float,
    address: str | None,
    flags: tuple[str, ...],
) -> None:
    """Start a cluster of servers on Ray, and return when all of them serve.

    Without --address, on the Ray that runs on this machine. If none does, and with --address local, a Ray of this
    machine alone is started, which ends with its last cluster.

    What follows -- are flags of `gradserve serve` for each server, such as --tls-certificate; files that they name must
    be on every node.
    """
    _check(name, servers, flags)
    with ray_errors():
        from gradserve_server.on_ray.local_ray import runs_here, start_local_ray, stop_local_ray

        local_ray = None
        if address == "local" or (address is None and not runs_here()):
            address, local_ray = start_local_ray(servers * cpus_per_server, timeout)

        from gradserve_server.on_ray.cluster import command_on_ray, start_cluster
        from gradserve_server.on_ray.directory import ClusterPlan

        path = None if state_dir is None else state_dir.absolute()
        plan = ClusterPlan(name, servers, cpus_per_server, gpus_per_server, path, flags, timeout)
        try:
            with command_on_ray(address):
                addresses = start_cluster(plan, local_ray)
        except BaseException:
            if local_ray is not None:
                stop_local_ray(local_ray)
            raise
    if local_ray is not None:
        tell(f"Ray at {address} (started for this cluster)")
    for index, each in enumerate(addresses):
        tell(f"server {index} at {each}")
    tell(f'gradserve.connect("gradserve+ray://{name}")')


def _check(name: str, servers: int, flags: tuple[str, ...]) -> None:
    make_config({"cluster": Setting(name, "--name"), "cluster_size": Setting(servers, "--servers")})
    for flag in flags:
        if flag.startswith(_OURS):
            raise SettingsError(f"{flag} is decided by the cluster")
