"""`gradserve top`: a server or a cluster at work, in a terminal."""

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.servers import (
    Answer,
    ask_all,
    described_servers,
    misplaced,
    server_options,
    tell_problems,
    tls_of,
)
from gradserve_server.commands.wording import echo_json, json_option, tell

if TYPE_CHECKING:
    import gradserve.aio
    from gradserve_protocol.server_status import ServerStatus


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="seconds between pictures"
)
@click.option("--name", metavar="TEXT", default="", help="only accumulators and parameters whose names contain this")
@json_option
@server_options
def top(address: str, timeout: float, interval: float, name: str, as_json: bool, **tls: Any) -> None:
    """Follow the server at ADDRESS: accumulators, parameters, their last rounds, slow workers, bytes, memory, errors.

    Of a cluster, all servers together. With --json, or into a pipe or a file, print one picture and end.

    Keys: s sorts, / filters, [ and ] change the panel, p pauses, q ends.
    """
    answers = ask_all(address, timeout, lambda client: client.server_status(name_contains=name), **tls)
    if as_json:
        echo_json(answers[0].value if len(answers) == 1 else _described(answers))
        tell_problems(answers)
        return
    if not sys.stdout.isatty():
        from gradserve_server.commands.top.panels import plain_text

        tell(*plain_text(address, answers).splitlines())
        tell_problems(answers)
        return
    import gradserve.aio
    from gradserve_server.commands.top.app import TopApp

    servers = [each.address for each in answers]

    async def run() -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(gradserve.aio.connect(each, timeout=timeout, tls=tls_of(**tls)))
                for each in servers
            ]

            async def take_picture(part: str, order: str) -> "tuple[Answer[ServerStatus], ...]":
                looks = [_look(client, at, servers, part, order) for at, client in enumerate(clients)]
                return tuple(await asyncio.gather(*looks))

            await TopApp(address, take_picture, interval, name, num_servers=len(servers)).run_async()

    asyncio.run(run())


async def _look(
    client: "gradserve.aio.Client", at: int, servers: list[str], part: str, order: str
) -> "Answer[ServerStatus]":
    import gradserve

    try:
        if len(servers) > 1 and (problem := misplaced((await client.server_info()).member, at, len(servers))):
            return Answer(at, servers[at], problem=problem)
        return Answer(at, servers[at], await client.server_status(name_contains=part, order=order))
    except gradserve.GradserveError as error:
        return Answer(at, servers[at], problem=str(error))


def _described(answers: "tuple[Answer[ServerStatus], ...]") -> dict[str, Any]:
    from gradserve_server.commands.top.picture import totals, update_totals

    statuses = [each.value for each in answers if each.value is not None]
    return {
        "totals": totals(statuses),
        "num_accumulators": sum(status.num_accumulators for status in statuses),
        "update_totals": update_totals(statuses),
        "num_parameters": sum(status.num_parameters for status in statuses),
        "num_layers": sum(status.num_layers for status in statuses),
        "servers": [
            {**server, "status": each.value} for server, each in zip(described_servers(answers), answers, strict=True)
        ],
    }
