"""`gradserve health`: asks servers whether they serve."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.servers import server_options, servers_at, tls_of
from gradserve_server.commands.wording import echo_json, json_option, table, tell, tell_problem
from gradserve_server.config.settings import SettingsError
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve

_MOST_THREADS = 64


@dataclass(frozen=True)
class _Health:
    """The health of a server."""

    address: str
    serves: bool
    status: str
    """"SERVING", "NOT_SERVING", or the status code of the failed call."""

    reason: str
    """Why the call failed."""


@click.command()
@json_option
@server_options
def health(address: str, timeout: float, as_json: bool, **tls: Any) -> None:
    """Exit with 0 if the server at ADDRESS serves, or all servers of a cluster, otherwise with 1."""
    silence_grpc()
    files = tls_of(**tls)
    servers = servers_at(address, timeout)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(servers))) as threads:
        found = list(threads.map(lambda each: _asked(each, timeout, files), servers))
    serves = all(each.serves for each in found)
    if as_json:
        several = {"serves": serves, "servers": [{"index": at, **vars(each)} for at, each in enumerate(found)]}
        echo_json(found[0] if len(found) == 1 else several)
    elif len(found) > 1:
        rows = [(str(at), each.address, each.status) for at, each in enumerate(found)]
        tell(*table(("SERVER", "ADDRESS", "STATUS"), rows, frozenset({0})))
        for at, each in enumerate(found):
            if each.reason:
                tell_problem(f"server {at} at {each.address}: {each.reason}")
    elif serves:
        tell(f"{found[0].address}: SERVING")
    else:
        raise click.ClickException(": ".join(filter(None, (found[0].address, found[0].status, found[0].reason))))
    click.get_current_context().exit(0 if serves else 1)


def _asked(address: str, timeout: float, tls: "gradserve.TLS | None") -> _Health:
    import gradserve
    from gradserve_server.rpc.health.check import check_health

    try:
        status, _, reason = check_health(address, timeout, tls).partition(": ")
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    return _Health(address, status == "SERVING", status, reason)
