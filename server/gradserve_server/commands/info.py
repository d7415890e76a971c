"""`gradserve info`: shows version, devices, limits and load of servers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.servers import Answer, ask_all, described_servers, server_options, tell_problems
from gradserve_server.commands.wording import duration, echo_json, figure, size, tell

if TYPE_CHECKING:
    import gradserve


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


def _share(share: Mapping[str, int]) -> str:
    used = ", ".join(f"{what} {figure(what, value)}" for what, value in share.items() if value)
    return used or "nothing"


def _ops_state(prepared: bool) -> str:
    return ", runs ops" if prepared else ", runs ops, kernels not loaded yet"
