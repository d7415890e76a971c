"""The servers at an address, each of which a command asks for itself: one that does not answer hides no other."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from gradserve_server.commands.server_address import connected, tls_of
from gradserve_server.commands.wording import tell_problem
from gradserve_server.config.settings import SettingsError
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve

T = TypeVar("T")

_MOST_THREADS = 64


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What a server has answered.

    Attributes:
        index: Its number in the list of servers.
        address: Its address.
        value: The answer; None if there is none.
        problem: Why there is none; empty if there is one.
    """

    index: int
    address: str
    value: T | None = None
    problem: str = ""


def servers_at(address: str, timeout: float) -> tuple[str, ...]:
    """Returns the addresses of the servers in their order: of one, or of those that the address lists or stands for.

    Args:
        address: What `gradserve.connect` takes as one text.
        timeout: Seconds to wait for servers that are not up yet, if the address stands for them.

    Raises:
        SettingsError: The address is not valid.
        click.ClickException: What looks servers up does not find them.
    """
    import gradserve
    from gradserve.discovery import servers_to_connect

    try:
        found = tuple(map(str, servers_to_connect(address, timeout)))
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    except gradserve.GradserveError as error:
        raise click.ClickException(f"{address}: {error}") from None
    is_named = len(found) == 1 and ("://" not in address or address.startswith("unix:"))
    return (address,) if is_named else found  # As it was written, messages name it.


def ask_all(
    address: str, timeout: float, question: "Callable[[gradserve.Client], T]", **tls: Any
) -> tuple[Answer[T], ...]:
    """Asks the servers at an address at the same time; returns their answers in the order of the servers.

    Args:
        address: What `gradserve.connect` takes as one text.
        timeout: Seconds that each call waits.
        question: Asks the server of a client.
        **tls: The TLS options.

    Raises:
        SettingsError: The address or an option is not valid.
        click.ClickException: There is a single server, and it does not answer; or servers cannot be looked up.
    """
    silence_grpc()
    servers = servers_at(address, timeout)
    if len(servers) == 1:
        with connected(servers[0], timeout, **tls) as client:
            return (Answer(0, client.address, question(client)),)
    files = tls_of(**tls)

    def ask(index: int) -> Answer[T]:
        return ask_one(servers, index, timeout, files, question)

    with ThreadPoolExecutor(min(_MOST_THREADS, len(servers))) as threads:
        return tuple(threads.map(ask, range(len(servers))))


def ask_one(
    servers: Sequence[str],
    index: int,
    timeout: float,
    tls: "gradserve.TLS | None",
    question: "Callable[[gradserve.Client], T]",
) -> Answer[T]:
    """Asks one of several servers, if it is the member of the cluster that the list says.

    Raises:
        SettingsError: A file of `tls` cannot be used.
    """
    import gradserve

    try:
        client = gradserve.connect(servers[index], timeout=timeout, tls=tls)
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(str(error)) from None
    try:
        with client:
            if problem := misplaced(client.server_info().member, index, len(servers)):
                return Answer(index, servers[index], problem=problem)
            return Answer(index, servers[index], question(client))
    except gradserve.GradserveError as error:
        return Answer(index, servers[index], problem=str(error))


def misplaced(member: str, index: int, size: int) -> str:
    """Returns what is wrong with a server at a place in a list of servers; empty if it belongs there.

    Args:
        member: Its place in its cluster, as `ServerInfo.member`.
        index: The place in the list.
        size: The length of the list.
    """
    cluster, _, place = member.rpartition(" ")
    if place == f"{index}/{size}":
        return ""
    if not member:
        return f"it is in no cluster, and {index} of {size} in this list"
    number, _, of = place.partition("/")
    return f"it is server {number} of {of} in cluster {cluster!r}, and {index} of {size} in this list"


def tell_problems(answers: Sequence[Answer[Any]]) -> None:
    """Prints, on standard error, which servers have not answered, and ends the command with 1 if there are any."""
    silent = [each for each in answers if each.problem]
    for each in silent:
        tell_problem(f"server {each.index} at {each.address}: {each.problem}")
    if silent:
        click.get_current_context().exit(1)


def described_servers(answers: Sequence[Answer[Any]]) -> list[dict[str, Any]]:
    """Returns the servers, for JSON: which they are, and why they have not answered."""
    return [{"index": each.index, "address": each.address, "problem": each.problem} for each in answers]
