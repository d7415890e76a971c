"""An HTTP port that shows documents, and what clients have asked it for."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from gradserve_protocol.server_status import AccumulatorStatus, ServerStatus
from gradserve_server.errors import UnauthenticatedError
from gradserve_server.observe.logs import LogMemory
from gradserve_server.observe.port import HttpContext, ObservationPort
from gradserve_server.observe.status.snapshot import Order, Snapshot, StatusRequest
from gradserve_server.observe.status.source import ServerFacts, StatusSource
from gradserve_server.security.identity import ANONYMOUS, Credentials, Identity, digest_of

START_SECONDS = 11_000.0
"""How long the server of a document has been up."""

_ORDERS: dict[Order, Callable[[AccumulatorStatus], float]] = {
    Order.RATE: lambda each: -each.rounds_per_second,
    Order.WAITING: lambda each: -each.num_waiting,
    Order.BYTES: lambda each: -each.num_bytes,
}


@dataclass(frozen=True, kw_only=True)
class _Documents(Snapshot):
    """Makes documents into pictures."""

    whole: ServerStatus
    requests: list[StatusRequest]

    async def picture(self, request: StatusRequest) -> ServerStatus:
        self.requests.append(request)
        part = request.name_contains.casefold()
        found = [each for each in self.whole.accumulators if part in f"{each.container}/{each.name}".casefold()]
        found.sort(key=lambda each: (each.container, each.name))
        if request.order in _ORDERS:
            found.sort(key=_ORDERS[request.order])
        shown = tuple(
            replace(each, rounds=each.rounds[-request.max_rounds :]) for each in found[: request.max_accumulators]
        )
        parameters = tuple(
            [
                replace(each, rounds=each.rounds[-request.max_rounds :])
                for each in self.whole.parameters
                if part in f"{each.container}/{each.name}".casefold()
            ]
        )
        return replace(
            self.whole,
            accumulators=shown,
            num_accumulators=len(found),
            parameters=parameters,
            num_parameters=len(parameters),
            past_runs=tuple(
                [each for each in self.whole.past_runs if part in f"{each.container}/{each.name}".casefold()]
            ),
        )


class _Source(StatusSource):
    """Gives documents where a server would take snapshots of itself."""

    def __init__(self, server: "DocumentsServer") -> None:
        self._server = server
        self.facts = ServerFacts(
            version="0.9.0",
            incarnation="f3a9",
            device="cpu",
            ops_prepared=lambda: True,
            memory=tuple,
            resources=dict,
            layers=tuple,
        )

    async def snapshot(self, request: StatusRequest | None = None) -> Snapshot:
        await self._server.talks.wait()
        whole = self._server.document
        whole = whole if isinstance(whole, ServerStatus) else whole(asyncio.get_running_loop().time())
        return _Documents(whole, 0.0, whole=whole, requests=self._server.requests)


class DocumentsServer:
    """Serves the page and documents on a free port of this machine, until the end of the block.

    Attributes:
        document: What it shows: a document, or a function of the time that returns one.
        token: The token that it wants; None for everybody.
        requests: What clients have asked for.
        logs: The lines of its log.
        talks: Set while it answers; without it, connections stay open and nothing comes.
    """

    def __init__(self, shown: ServerStatus | Callable[[float], ServerStatus]) -> None:
        self.document = shown
        self.token: str | None = None
        self.requests: list[StatusRequest] = []
        self.logs = LogMemory()
        self.talks = asyncio.Event()
        self.talks.set()
        self._address = "127.0.0.1:0"
        self._port = self._new_port()

    @property
    def url(self) -> str:
        """The address of the page."""
        return self._port.url

    async def num_requests(self) -> int:
        """How often clients have asked for something."""
        return len(self.requests)

    def start(self) -> None:
        """Begins to serve, at the same address as before."""
        self._port = self._new_port()
        self._port.bind()
        self._address = str(self._port.address)
        self._port.serve()

    async def stop(self) -> None:
        """Ends all connections."""
        await self._port.close()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.stop()

    def _new_port(self) -> ObservationPort:
        shown = HttpContext(
            status=_Source(self),
            identify=self._identify,
            asks_for_token=self.token is not None,
            hosts=(),
            tls=None,
            logs=self.logs,
        )
        return ObservationPort(self._address, shown)

    def _identify(self, credentials: Credentials) -> Identity:
        if self.token is not None and credentials.token_digest != digest_of(self.token):
            raise UnauthenticatedError("the token is not one of this server's")
        return ANONYMOUS
