"""The server that `gradserve run` starts, and its credentials."""

import asyncio
import base64
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradserve_protocol.address import Address
from gradserve_protocol.variables import ADDRESS_VARIABLE, CONNECT_VARIABLES, TLS_FILE_VARIABLES, TOKEN_VARIABLE
from gradserve_server.commands.run.processes import Child, Guard, Output, Program, Stopping, described_end

_SERVING = re.compile(r"serving on ([^\s\",]+)")
_STATUS_PAGE = re.compile(r"status page and metrics on (http[^\s\"]+)")
_STATUS_PAGE_SECONDS = 0.5
"""The time between the two lines; there is no second one if the server has no HTTP port."""
_DRAIN_SECONDS = 35.0
"""The time in which a server that is to end has ended: its own drain time is 30 s."""
_MOST_FAILED_STARTS = 5
_PAUSE_SECONDS = 0.2
_DAYS = 365
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The addresses that stand for all of a machine, and the ones by which it reaches itself."""


class ServerError(Exception):
    """The server cannot be started. The message says why."""


@dataclass(frozen=True)
class Credentials:
    """All that a client needs to trust a server, and to be trusted.

    Attributes:
        ca: The file with the authority of the server's certificate.
        token: The bearer token.
    """

    ca: Path
    token: str

    @property
    def ca_data(self) -> str:
        """The authority as one word."""
        return base64.b64encode(ssl.PEM_cert_to_DER_cert(self.ca.read_text())).decode()

    @classmethod
    def in_folder(cls, folder: Path, hosts: tuple[str, ...]) -> "Credentials":
        """Makes a certificate for hosts, and, unless they are there from an earlier run, an authority and a token.

        Raises:
            ServerError: They cannot be made.
        """
        from gradserve_server.commands.credentials import THIS_MACHINE, identity_entry
        from gradserve_server.security.access_file import AccessFileError, add_identity
        from gradserve_server.security.authority import Authority, AuthorityError
        from gradserve_server.security.identity import new_token

        kept = folder / "token"
        try:
            Authority.in_folder(folder).issue_server(tuple(dict.fromkeys((*hosts, *THIS_MACHINE))), _DAYS)
            if not kept.exists():
                token = new_token()
                # A chief may make what the run needs on the server, whichever worker comes first.
                add_identity(folder / "access.toml", identity_entry("run", token, role="chief", container="*"))
                with open(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(token)
            return cls(folder / "ca.pem", kept.read_text())
        except (AuthorityError, AccessFileError, OSError) as error:
            raise ServerError(str(error)) from None

    @staticmethod
    def flags(folder: Path) -> tuple[str, ...]:
        """Returns the flags of a server with the files of a folder."""
        files = {"--access": "access.toml", "--tls-certificate": "server.pem", "--tls-key": "server.key"}
        return tuple(word for flag, name in files.items() for word in (flag, str(folder / name)))


@dataclass(frozen=True)
class ServerPlan:
    """The server that a run is to start.

    Attributes:
        listen: The address for other machines; None for one that only this machine reaches.
        state_dir: Its state directory; None for none.
        folder: The folder for its credentials.
    """

    listen: Address | None
    state_dir: Path | None
    folder: Path

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names for its certificate, the one for other machines first."""
        assert self.listen is not None
        return (reachable_host(self.listen.host), socket.gethostname())

    def command(self, port: int = 0, status_page: str = "") -> tuple[str, ...]:
        """Returns its command.

        Args:
            port: The port that it had before; 0 if it has not run.
            status_page: The URL of the status page that it had before.
        """
        listen = self.listen or Address("127.0.0.1")
        words = [sys.executable, "-m", "gradserve_server", "serve"]
        words += ["--listen", str(Address(listen.host, port or listen.port))]
        # Where it serves is read from its log.
        words += ["--log-level", "debug" if os.environ.get("GRADSERVE_LOG_LEVEL", "").lower() == "debug" else "info"]
        if status_page:
            words += ["--http-listen", status_page.removeprefix("http://").removeprefix("https://").strip("/")]
        if self.state_dir is not None:
            words += ["--state-dir", str(self.state_dir)]
        if self.listen is not None:
            words += Credentials.flags(self.folder)
        return tuple(words)

    def clients(self, address: str = "", token: str = "") -> dict[str, str]:
        """Returns the environment of its clients on this machine, or, without an address, its own.

        Args:
            address: Its address.
            token: Its token; empty for none.
        """
        others = (*CONNECT_VARIABLES, TOKEN_VARIABLE)
        found = {name: value for name, value in os.environ.items() if name not in others}
        if address:
            found[ADDRESS_VARIABLE] = address
        if token:
            found |= {TLS_FILE_VARIABLES["ca"]: str(self.folder / "ca.pem"), TOKEN_VARIABLE: token}
        return found


class OwnServer:
    """A server that runs as long as its workers.

    Attributes:
        local_address: Its address for workers on this machine.
        address: Its address for other machines, the same if they cannot reach it.
        status_page: The URL of its status page; empty if it has none.
        credentials: What clients need; None for nothing.
    """

    def __init__(self, plan: ServerPlan, guard: Guard, output: Output, stopping: Stopping) -> None:
        """Makes a server that does not run yet.

        Raises:
            ServerError: Its credentials cannot be made.
        """
        self._plan = plan
        self._guard = guard
        self._output = output
        self._stopping = stopping
        self._port = 0
        self._ending = asyncio.Event()
        self.local_address = self.address = self.status_page = ""
        self.credentials = None if plan.listen is None else Credentials.in_folder(plan.folder, plan.hosts)
        self._serves, self._has_page = asyncio.Event(), asyncio.Event()
        self._child: Child | None = None
        self._task: asyncio.Task[int] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its workers."""
        return self._plan.clients(self.local_address, "" if self.credentials is None else self.credentials.token)

    async def start(self, tell: Callable[[str], object]) -> bool:
        """Starts the server, and waits until it serves; returns False if everything is to end before.

        From then on, a server with a state directory is started again when it ends. Without one, workers cannot go on,
        and everything is to end.

        Args:
            tell: Prints a line about the server.

        Raises:
            ServerError: It does not start; its output says why.
        """
        self._task = asyncio.create_task(self._keep(tell))
        serves, stop = asyncio.create_task(self._serves.wait()), asyncio.create_task(self._stopping.begun.wait())
        await asyncio.wait({serves, stop, self._task}, return_when=asyncio.FIRST_COMPLETED)
        serves.cancel()
        stop.cancel()
        if self._task.done():
            raise ServerError(f"the server {described_end(self._task.result())} before it served")
        if self._stopping.begun.is_set():
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_page.wait(), _STATUS_PAGE_SECONDS)
        return True

    async def stop(self) -> None:
        """Lets the server drain and end; kills it if that takes too long, or is urgent."""
        if self._task is None or self._task.done():
            return
        self._ending.set()
        if self._child is not None:
            self._child.send(signal.SIGTERM)
        if not await self._stopping.ended_in_time({self._task}, _DRAIN_SECONDS) and self._child is not None:
            self._child.send(signal.SIGKILL)
            await self._task

    async def _keep(self, tell: Callable[[str], object]) -> int:
        num_failed = 0
        while True:
            self._serves.clear()
            # If it did not start, another program may have its status page's port.
            page = "" if num_failed else self.status_page
            program = Program("server", self._plan.command(self._port, page), self._plan.clients())
            self._child = Child(program, self._guard)
            code = await self._child.wait(self._output, self._read_line)
            num_failed = 0 if self._serves.is_set() else num_failed + 1
            if self._ending.is_set() or not self._port:
                return code
            how = f"the server {described_end(code)}"
            if self._plan.state_dir is None or num_failed == _MOST_FAILED_STARTS:
                tell(f"{how}, and the run with it" + ("" if num_failed else "; with --state-dir, it would go on"))
                self._stopping.begin(signal.SIGTERM, code or 1)
                return code
            tell(f"{how}; it is started again")
            await asyncio.sleep(_PAUSE_SECONDS * num_failed)
            if self._ending.is_set():
                return code

    def _read_line(self, line: str) -> None:
        if found := _SERVING.search(line):
            self._port = Address.to_connect(found[1]).port
            host = "127.0.0.1" if self._plan.listen is None else self._plan.listen.host
            self.local_address = str(Address(_ANYWHERE.get(host, host), self._port))
            self.address = str(Address(reachable_host(host), self._port))
            self._serves.set()
        if found := _STATUS_PAGE.search(line):
            self.status_page = found[1]
            self._has_page.set()


def reachable_host(host: str) -> str:
    """Returns the host by which other machines reach a listening address."""
    if host not in _ANYWHERE:
        return host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect(("192.0.2.1", 9))  # Sends nothing: asks which of this machine's addresses would.
            found: str = route.getsockname()[0]
            return found
    except OSError:
        return socket.gethostname()


def write_ca(data: str, folder: Path) -> Path:
    """Writes the authority that `Credentials.ca_data` is to a file in a folder.

    Raises:
        ValueError: It is none.
    """
    pem = ssl.DER_cert_to_PEM_cert(base64.b64decode(data, validate=True))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except ssl.SSLError:
        raise ValueError("it is not a certificate") from None
    path = folder / "ca.pem"
    path.write_text(pem)
    return path
