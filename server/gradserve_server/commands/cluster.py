"""`gradserve cluster`: runs several servers as a cluster on Ray."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradserve_protocol.extras import install_command
from gradserve_ray.directory import SeenMember
from gradserve_server.commands.servers import connection_options, tls_of
from gradserve_server.commands.wording import ExitCode, echo_json, json_option, table, tell, tell_problem
from gradserve_server.config.settings import Setting, SettingsError, make_config
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve

_OURS = ("--address-file", "--cluster", "--listen", "--rounds-file", "--state-dir")
"""Flags of servers that the cluster decides, and those that begin with them."""
DEFAULT_NAME = "gradserve"
ray_address_option = click.option(
    "--address",
    metavar="RAY_ADDRESS",
    envvar="RAY_ADDRESS",
    help="Ray, as HOST:PORT of its head; by default the Ray that runs on this machine.",
)


@contextmanager
def ray_errors() -> Iterator[None]:
    """Turns errors of clusters and a missing extra into messages."""
    from gradserve_ray.directory import ClusterError

    try:
        yield
    except ClusterError as error:
        raise click.ClickException(str(error)) from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise click.ClickException(f"clusters need Ray; install it with: {install_command('ray')}") from None


@contextmanager
def _cluster_on_ray(name: str | None, address: str | None) -> Iterator[str]:
    """Connects to Ray for a block; yields the name of the cluster, by default that of the only one."""
    with ray_errors():
        from gradserve_ray.cluster import command_on_ray
        from gradserve_ray.member import only_cluster

        with command_on_ray(address):
            yield name or only_cluster()


@click.group()
def cluster() -> None:
    """Run several servers as a cluster on Ray, which starts them again when they end.

    Needs the extra ray.
    """


@cluster.command()
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
    _check_plan(name, servers, flags)
    with ray_errors():
        from gradserve_ray.local_ray import runs_here, start_local_ray, stop_local_ray

        local_ray = None
        if address == "local" or (address is None and not runs_here()):
            address, local_ray = start_local_ray(servers * cpus_per_server, timeout)

        from gradserve_ray.cluster import command_on_ray, start_cluster
        from gradserve_ray.directory import ClusterPlan

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


def _check_plan(name: str, servers: int, flags: tuple[str, ...]) -> None:
    make_config({"cluster": Setting(name, "--name"), "cluster_size": Setting(servers, "--servers")})
    for flag in flags:
        if flag.startswith(_OURS):
            raise SettingsError(f"{flag} is decided by the cluster")


@cluster.command()
@click.argument("name", required=False)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that servers have to end in order; those that have not are killed.",
)
@ray_address_option
def down(name: str | None, timeout: float, address: str | None) -> None:
    """End the cluster NAME; without NAME, the only one.

    A Ray that was started by `gradserve cluster up` ends with its last cluster. State directories stay.
    """
    with _cluster_on_ray(name, address) as name:
        from gradserve_ray.cluster import stop_cluster
        from gradserve_ray.local_ray import stop_local_ray

        local_ray = stop_cluster(name, timeout)
    if local_ray is not None:
        stop_local_ray(local_ray)
    tell(f"{name} has ended" + (", and its Ray" if local_ray is not None else ""))


@cluster.command()
@click.argument("name", required=False)
@click.option("--servers", type=click.IntRange(min=1), required=True, help="The number of servers after it.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that open rounds have to end, then servers to stop, then to serve.",
)
@click.option(
    "--drop-volatile",
    is_flag=True,
    help="Let accumulators and parameters of durability none end; otherwise they are an error.",
)
@ray_address_option
def resize(name: str | None, servers: int, timeout: float, drop_volatile: bool, address: str | None) -> None:
    """Change the number of servers of the cluster NAME, between rounds; without NAME, of the only one.

    New rounds are held until no round is open; then the servers stop, accumulators and parameters that get another home
    move there, sharded ones are divided again, and all servers start. Clients have to connect again. If
    anything fails, the cluster goes on as before.
    """
    make_config({"cluster": Setting("x", "NAME"), "cluster_size": Setting(servers, "--servers")})
    with _cluster_on_ray(name, address) as name:
        from gradserve_ray.resizing import resize_cluster

        done = resize_cluster(name, servers, timeout, drop_volatile=drop_volatile)
    for move in done.moves:
        tell(f"{move.key.container}/{move.key.name}: {move}")
    for lost in done.lost:
        tell(f"{lost}: lost, its durability is none")
    for index, each in enumerate(done.addresses):
        tell(f"server {index} at {each}")
    kinds = Counter(move.key.kind for move in done.moves)
    moved = f"{kinds['accumulator']} accumulators and {kinds['parameters']} parameters moved"
    tell(f"{name}: {done.before} to {servers} servers; {moved}, with the same digests")


@cluster.command()
@click.argument("name", required=False)
@json_option
@ray_address_option
@connection_options
def status(name: str | None, as_json: bool, address: str | None, timeout: float, **tls: Any) -> None:
    """Show the servers of the cluster NAME; without NAME, of the only one.

    Exits with 0 if all of them serve, otherwise with 1.
    """
    silence_grpc()
    with _cluster_on_ray(name, address) as name:
        from gradserve_ray.cluster import look_at_cluster

        seen = look_at_cluster(name)
    files = tls_of(**tls)
    with ThreadPoolExecutor(max_workers=min(32, len(seen))) as threads:
        rows = list(threads.map(lambda each: _health_of(each, timeout, files), seen))
    serves = all(row.serves for row in rows)
    if as_json:
        echo_json({"name": name, "serves": serves, "servers": rows})
    else:
        tell(*_member_table(rows))
        for row in rows:
            if why := row.problem or row.reason:
                tell_problem(f"server {row.index}: {why}")
    click.get_current_context().exit(ExitCode.DONE if serves else ExitCode.FAILED)


@dataclass(frozen=True)
class _Row(SeenMember):
    """A server as the table shows it."""

    serves: bool
    status: str
    """"SERVING", "NOT_SERVING", or the status code of the failed call."""

    reason: str
    """Why the call failed."""


def _health_of(seen: SeenMember, timeout: float, tls: "gradserve.TLS | None") -> _Row:
    from gradserve_server.rpc.health.check import check_health

    answer = check_health(seen.address, timeout, tls) if seen.address else "NOT_SERVING"
    code, _, reason = answer.partition(": ")
    return _Row(**vars(seen), serves=code == "SERVING", status=code, reason=reason)


def _member_table(rows: list[_Row]) -> list[str]:
    header = ("INDEX", "ADDRESS", "NODE", "STATE", "RESTARTS", "STATUS")
    cells = [
        (str(row.index), row.address or "-", row.node or "-", row.state, str(row.restarts), row.status) for row in rows
    ]
    return table(header, cells, frozenset({0, 4}))
