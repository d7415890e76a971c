"""`gradserve logs`: the latest lines of a server's log."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.servers import Answer, ask_all, described_things, server_options, tell_problems
from gradserve_server.commands.wording import echo_json, json_option, tell

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import LogLine, ServerLog

_LEVELS = ("debug", "info", "warning", "error")
_MOST = 1000
_EVERY_SECONDS = 1.0


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with new lines as they come, until Ctrl-C.")
@click.option("--level", type=click.Choice(_LEVELS), default="debug", help="the lowest level  [default: debug]")
@click.option("--contains", metavar="TEXT", default="", help="only lines with this in message, logger or request id")
@click.option("--lines", type=click.IntRange(1, _MOST), default=100, help="the most lines  [default: 100]")
@json_option
@server_options
def logs(
    address: str, timeout: float, follow: bool, level: str, contains: str, lines: int, as_json: bool, **tls: Any
) -> None:
    """Print the latest lines of the log of the server at ADDRESS, or of all servers of a cluster.

    Servers keep the last 1,000, at the level at which they log. You need the role of an admin in all containers. Times
    are in UTC.
    """
    if follow and as_json:
        raise click.UsageError("--follow prints lines as they come, --json one object: choose one of both")
    new = NewLines()

    def ask(client: "gradserve.Client") -> "ServerLog":
        most = lines if new.is_first(client.address) else _MOST
        found = client.server_log(max_lines=most, level=level, contains=contains, after=new.after(client.address))
        if new.has_restarted(client.address, found):
            found = client.server_log(max_lines=_MOST, level=level, contains=contains)
        return new.noted(client.address, found)

    answers = ask_all(address, timeout, ask, **tls)
    if as_json:
        found = [(each.index, line) for each in answers for line in _lines(each)]
        echo_json(described_things("lines", found, answers))
        tell_problems(answers)
        return
    tell(*_text(answers))
    tell_problems(answers)
    with suppress(KeyboardInterrupt):
        while follow:
            sys.stdout.flush()
            time.sleep(_EVERY_SECONDS)
            tell(*_text(_asked_again(address, timeout, ask, **tls)))


def _asked_again(address: str, timeout: float, ask: Any, **tls: Any) -> "Sequence[Answer[ServerLog]]":
    """Asks once more; nothing comes from servers that are away for the moment."""
    import gradserve

    with suppress(gradserve.GradserveError):
        found: Sequence[Answer[ServerLog]] = ask_all(address, timeout, ask, **tls)
        return found
    return ()


class NewLines:
    """The last lines that were seen of servers, by address: a server that was started again counts from 1."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int]] = {}

    def is_first(self, address: str) -> bool:
        """Returns True before the first lines of a server."""
        return address not in self._seen

    def after(self, address: str) -> int:
        """Returns the number of the last line that was seen of a server; 0 before the first."""
        return self._seen.get(address, ("", 0))[1]

    def has_restarted(self, address: str, log: "ServerLog") -> bool:
        """Returns True if lines are of another run of a server than the lines before."""
        return not self.is_first(address) and self._seen[address][0] != log.incarnation

    def noted(self, address: str, log: "ServerLog") -> "ServerLog":
        """Notes that lines of a server were seen; returns them."""
        last = 0 if self.has_restarted(address, log) else self.after(address)
        self._seen[address] = log.incarnation, max([last, *[each.number for each in log.lines]])
        return log


def _lines(answer: "Answer[ServerLog]") -> "Sequence[LogLine]":
    return () if answer.value is None else answer.value.lines


def _text(answers: "Sequence[Answer[ServerLog]]") -> Iterator[str]:
    found = [(line.time, each.index, line) for each in answers for line in _lines(each)]
    for _, index, line in sorted(found, key=lambda each: each[:2]):
        server = f"server {index}: " if len(answers) > 1 else ""
        request_id = f" [{line.request_id}]" if line.request_id else ""
        at = f"{datetime.fromtimestamp(line.time, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]
        first, *rest = line.message.split("\n")
        yield f"{server}{at} {line.level} {line.logger}: {first}{request_id}"
        yield from (f"    {each}" for each in rest)
