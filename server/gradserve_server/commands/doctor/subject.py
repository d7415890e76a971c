"""The subject of an examination, a server and the way to it, and findings about it."""

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradserve_server.commands.servers import on_server, tls_of

if TYPE_CHECKING:  # imported late: other commands do not need them, and start sooner
    import gradserve
    from gradserve.transport.route import Route
    from gradserve.transport.settings import ConnectionSettings
    from gradserve_protocol.server_status import ServerStatus


class Verdict(StrEnum):
    """The verdict of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: The check.
        verdict: Its verdict.
        found: What it has found.
        cure: What to do: a command, an option or a variable; empty if there is nothing to do.
        server: The address of the server; empty for this machine.
    """

    name: str
    verdict: Verdict
    found: str
    cure: str = ""
    server: str = ""


Observation = tuple[Verdict, str, str]
"""A verdict, what was found, and the cure."""


def ok(found: str) -> Observation:
    """Returns that nothing is wrong."""
    return Verdict.OK, found, ""


def warning(found: str, cure: str) -> Observation:
    """Returns what makes training slow or risky, and the cure."""
    return Verdict.WARNING, found, cure


def problem(found: str, cure: str) -> Observation:
    """Returns what keeps a client from training, and the cure."""
    return Verdict.PROBLEM, found, cure


@dataclass(frozen=True)
class Subject:
    """A server and the way to it. What checks share is asked for once, when the first of them needs it.

    Attributes:
        address: The server's address.
        timeout: Seconds that each call waits.
        container: Where to train; empty for the default container.
        tls_options: The options of `tls_of`.
        index: The number of the server in the list.
        num_servers: The length of the list.
        stack: Closes the client.
    """

    address: str
    timeout: float
    container: str
    tls_options: Mapping[str, Any]
    index: int
    num_servers: int
    stack: contextlib.ExitStack

    @cached_property
    def tls(self) -> "gradserve.TLS | None":
        return None if self.route.address.path else tls_of(**self.tls_options)

    @cached_property
    def settings(self) -> "ConnectionSettings":
        from gradserve.transport.settings import ConnectionSettings

        return ConnectionSettings.wanted(self.timeout, None, self.tls, None, None, os.environ)

    @cached_property
    def route(self) -> "Route":
        from gradserve.transport.route import Route
        from gradserve_protocol.address import Address

        return Route.to(Address.to_connect(self.address))

    @property
    def is_of_this_machine(self) -> bool:
        from gradserve.transport.route import is_loopback

        return bool(self.route.address.path) or is_loopback(self.route.address.host)

    @cached_property
    def client(self) -> "gradserve.Client":
        import gradserve

        return self.stack.enter_context(gradserve.connect(self.address, timeout=self.timeout, tls=self.tls))

    @cached_property
    def info(self) -> "gradserve.ServerInfo":
        """The server's description, taken while it stores a tensor: so each caller that it knows uses something."""
        import gradserve

        with contextlib.suppress(gradserve.ResourceExhaustedError):
            handle = self.client.put(0.0)
            try:
                return self.client.server_info()
            finally:
                self.client.delete(handle)
        return self.client.server_info()

    @cached_property
    def status(self) -> "ServerStatus":
        return self.client.server_status(container=self.container, order="waiting", max_accumulators=1000)

    def on_server(self, command: str) -> str:
        """Returns a command that asks this server, with the options that reach it."""
        return on_server(["gradserve", *shlex.split(command)], self.address, self.tls_options)
