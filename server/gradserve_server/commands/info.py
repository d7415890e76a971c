"""`gradserve info` and `gradserve health`: what servers say of themselves, and whether they serve."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.servers import (
    Answer,
    ask_all,
    described_servers,
    server_options,
    servers_at,
    tell_problems,
    tls_of,
)
from gradserve_server.commands.wording import (
    ExitCode,
    duration,
    echo_json,
    figure,
    json_option,
    size,
    table,
    tell,
    tell_problem,
)
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
    click.get_current_context().exit(ExitCode.DONE if serves else ExitCode.FAILED)


def _asked(address: str, timeout: float, tls: "gradserve.TLS | None") -> _Health:
    import gradserve
    from gradserve_server.rpc.health.check import check_health

    try:
        status, _, reason = check_health(address, timeout, tls).partition(": ")
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(error.message) from None
    return _Health(address, status == "SERVING", status, reason)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the names of gradserve.ServerInfo.")
@server_options
def info(address: str, timeout: float, as_json: bool, **tls: Any) -> None:
    """Show version, devices, limits and load of the server at ADDRESS, or of each server of a cluster."""
    answers = ask_all(address, timeout, lambda client: client.server_info(), **tls)
    if as_json:
        several = zip(described_servers(answers), answers, strict=True)
        echo_json(
            answers[0].value
            if len(answers) == 1
            else {"servers": [{**server, "info": each.value} for server, each in several]}
        )
    else:
        for each in answers:
            if len(answers) > 1:
                tell(*([""] if each.index else []), _title(each))
            if each.value is not None:
                _show(each.value)
    tell_problems(answers)


def _title(answer: "Answer[gradserve.ServerInfo]") -> str:
    return f"server {answer.index} at {answer.address}:" + (" no answer" if answer.problem else "")


def _show(description: "gradserve.ServerInfo") -> None:
    import gradserve

    tell(f"gradserve {description.version}, up {duration(description.uptime)}; this client is {gradserve.__version__}")
    for device in description.devices:
        runs_ops = _ops_state(description.ops_prepared) if device.name == description.device else ""
        tell(f"  {device.name}: {device.description}, {size(device.total_memory_bytes)}{runs_ops}")
    if description.why_no_gpu:
        tell(f"  no GPU: {description.why_no_gpu}")
    if description.member:
        tell(f"member of a cluster: {description.member}")
    if description.upstream:
        tell(f"aggregator, which passes gradients on to: {description.upstream}")
    reason = description.transport.why_not_faster
    tell(f"calls from here take: {description.transport.way}" + (f" ({reason})" if reason else ""))
    if description.http_url:
        tell(f"status page: {description.http_url}")
    if description.state_disk:
        tell(f"state directory: {disk_text(description)}")
    figures = [("limits", description.limits), ("in use", description.usage)]
    if description.device_usage:
        figures.append((description.device, description.device_usage))
    for title, values in figures:
        tell(f"{title}:")
        for name, value in values.items():
            tell(f"  {name}: {figure(name, value)}")
    for title, shares in (("identity", description.identities), ("container", description.containers)):
        if shares:
            tell(f"in use by {title}:")
        for name, share in shares.items():
            tell(f"  {name}: {_share(share)}")


def disk_text(description: "gradserve.ServerInfo") -> str:
    """Returns how much of the disk of a state directory is free."""
    free, total = (description.state_disk[name] for name in ("free_bytes", "total_bytes"))
    return f"{size(free)} of {size(total)} free"


def _share(share: Mapping[str, int]) -> str:
    used = ", ".join(f"{what} {figure(what, value)}" for what, value in share.items() if value)
    return used or "nothing"


def _ops_state(prepared: bool) -> str:
    return ", runs ops" if prepared else ", runs ops, kernels not loaded yet"
