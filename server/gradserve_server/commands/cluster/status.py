"""`gradserve cluster status`: shows the servers of a cluster."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.as_json import echo_json, json_option
from gradserve_server.commands.cluster.ray_address import ray_address_option, ray_errors
from gradserve_server.commands.server_address import connection_options, tls_of
from gradserve_server.commands.wording import table, tell, tell_problem
from gradserve_server.on_ray.directory import SeenMember
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve


@dataclass(frozen=True)
class _Row(SeenMember):
    """A server as the table shows it."""

    serves: bool
    status: str
    """"SERVING", "NOT_SERVING", or the status code of the failed call."""

    reason: str
    """Why the call failed."""


@click.command()
@click.argument("name", required=False)
@json_option
@ray_address_option
@connection_options
def status(name: str | None, as_json: bool, address: str | None, timeout: float, **tls: Any) -> None:
    """Show the servers of the cluster NAME; without NAME, of the only one.

    Exits with 0 if all of them serve, otherwise with 1.
    """
    silence_grpc()
    with ray_errors():
        from gradserve_server.on_ray.cluster import command_on_ray, look_at_cluster
        from gradserve_server.on_ray.member import only_cluster

        with command_on_ray(address):
            name = name or only_cluster()
            seen = look_at_cluster(name)
    files = tls_of(**tls)
    with ThreadPoolExecutor(max_workers=min(32, len(seen))) as threads:
        rows = list(threads.map(lambda each: _asked(each, timeout, files), seen))
    serves = all(row.serves for row in rows)
    if as_json:
        echo_json({"name": name, "serves": serves, "servers": rows})
    else:
        tell(*_table(rows))
        for row in rows:
            if why := row.problem or row.reason:
                tell_problem(f"server {row.index}: {why}")
    click.get_current_context().exit(0 if serves else 1)


def _asked(seen: SeenMember, timeout: float, tls: "gradserve.TLS | None") -> _Row:
    from gradserve_server.rpc.health.check import check_health

    answer = check_health(seen.address, timeout, tls) if seen.address else "NOT_SERVING"
    code, _, reason = answer.partition(": ")
    return _Row(**vars(seen), serves=code == "SERVING", status=code, reason=reason)


def _table(rows: list[_Row]) -> list[str]:
    header = ("INDEX", "ADDRESS", "NODE", "STATE", "RESTARTS", "STATUS")
    cells = [
        (str(row.index), row.address or "-", row.node or "-", row.state, str(row.restarts), row.status) for row in rows
    ]
    return table(header, cells, frozenset({0, 4}))
