"""`gradserve top`: a server at work, in a terminal."""

import asyncio
from typing import Any

import click

from gradserve_server.commands.as_json import echo_json, json_option
from gradserve_server.commands.server_address import address_argument, connected, connection_options, tls_of


@click.command()
@address_argument
@click.option(
    "--interval", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="seconds between pictures"
)
@click.option("--name", metavar="TEXT", default="", help="only accumulators whose names contain this")
@json_option
@connection_options
def top(address: str, timeout: float, interval: float, name: str, as_json: bool, **tls: Any) -> None:
    """Follow the server at ADDRESS: accumulators, their last rounds, slow workers, bytes, memory, errors.

    With --json, print one picture and end. Keys: s sorts, / filters, [ and ] change the panel, p pauses, q ends.
    """
    with connected(address, timeout, **tls) as client:
        status = client.server_status(name_contains=name)
    if as_json:
        echo_json(status)
        return
    import gradserve.aio
    from gradserve.server_status import ServerStatus
    from gradserve_server.commands.top.app import TopApp

    async def run() -> None:
        async with gradserve.aio.connect(address, timeout=timeout, tls=tls_of(**tls)) as client:

            async def take_picture(part: str, order: str) -> ServerStatus:
                return await client.server_status(name_contains=part, order=order)

            await TopApp(address, take_picture, interval, name).run_async()

    asyncio.run(run())
