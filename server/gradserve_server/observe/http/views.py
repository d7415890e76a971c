"""The answers of the HTTP port, and who gets them: metrics, status, events and the files of the status page."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from importlib import resources
from typing import Any, Generic, TypeVar

from gradserve_protocol.server_status import AccumulatorStatus, ParametersStatus
from gradserve_server.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    ServiceError,
    UnauthenticatedError,
)
from gradserve_server.observe.http.exchange import Answer, HeadError, Request
from gradserve_server.observe.logs import LogMemory, LogRequest, check_reader
from gradserve_server.observe.metrics import Exposition
from gradserve_server.observe.status.snapshot import Order, Snapshot, StatusRequest
from gradserve_server.observe.status.source import Figures
from gradserve_server.observe.what_if import what_if
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.security.identity import ALL_CONTAINERS, Credentials, Identity, in_authorization

EVERY_SECONDS = 1.0
"""The greatest age of a value that callers share."""
REST = 20.0
"""After making a value, `Latest` pauses for at least this many times as long as that took."""
_MOST_PICTURES = 64
_MOST_BYTES = 64 << 20
_ARRIVALS_PER_ITEM = 4
"""The gradients that are serialized in the time of one item of a turn."""
_MOST_REPLAYED = 10
"""The accumulators and parameters whose rounds are replayed in one answer."""
_NUMBERS = ("max_accumulators", "max_rounds", "max_workers", "max_past_runs")
_TEXTS = ("container", "name_contains")
T = TypeVar("T")


class Pictures:
    """Makes pictures of the latest snapshot, one at a time, and each only once however many viewers ask for it.

    Used on the event loop of the HTTP port only.
    """

    def __init__(self, snapshots: Latest[Snapshot], most: int = _MOST_PICTURES, most_bytes: int = _MOST_BYTES) -> None:
        self._snapshots = snapshots
        self._most = most
        self._most_bytes = most_bytes
        self._making: dict[tuple[int, StatusRequest], asyncio.Task[bytes]] = {}
        self._snapshot: Snapshot | None = None
        self._turn = asyncio.Lock()
        self._parts: dict[int, tuple[AccumulatorStatus | ParametersStatus, bytes]] = {}
        self._slice = Turn()

    async def json(self, request: StatusRequest) -> bytes:
        """Returns a picture as JSON with the names of GetServerStatusResponse.

        Raises:
            ResourceExhaustedError: There are too many different pictures of this snapshot.
        """
        snapshot = await self._snapshots.get()
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._parts.clear()
            for name, task in list(self._making.items()):
                if task.done():
                    del self._making[name]
        name = id(snapshot), request
        making = self._making.get(name)
        if making is None:
            made = sum([len(each.result()) for each in self._making.values() if _has_result(each)])
            if len(self._making) >= self._most or made >= self._most_bytes:
                raise ResourceExhaustedError("too many different queries at once; try again in a second")
            making = self._making[name] = asyncio.create_task(self._make(snapshot, request))
        return await asyncio.shield(making)

    async def what_if(self, request: StatusRequest) -> bytes:
        """Returns what the rounds of the first ten of each kind would have been under other rules, as JSON.

        Those whose rounds are too few are not in it.
        """
        async with self._turn:
            snapshot = await self._snapshots.get()
            status = await snapshot.picture(
                dataclasses.replace(request, max_accumulators=min(request.max_accumulators, _MOST_REPLAYED))
            )
            found: dict[str, list[object]] = {"accumulators": [], "parameters": []}
            for kind, listed in found.items():
                for each in getattr(status, kind):
                    replayed = what_if(each.rounds, has_grace=kind == "parameters")
                    if replayed is not None:
                        listed.append({"container": each.container, "name": each.name, "what_if": replayed})
                    await asyncio.sleep(0)
            return _serialized(found)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)

    async def _make(self, snapshot: Snapshot, request: StatusRequest) -> bytes:
        async with self._turn:
            status = await snapshot.picture(request)
            # Piece by piece, because no other thread runs while json serializes one.
            parts = {
                "accumulators": [await self._part(each) for each in status.accumulators],
                "parameters": [await self._part(each) for each in status.parameters],
            }
            fields = {name: _serialized(value) for name, value in vars(status).items() if name not in parts}
            return _object(fields | {name: b"[%b]" % b",".join(pieces) for name, pieces in parts.items()})

    async def _part(self, described: AccumulatorStatus | ParametersStatus) -> bytes:
        """Returns an accumulator or parameters as JSON; pictures share it."""
        known = self._parts.get(id(described))
        if known is not None:
            return known[1]
        rounds = []
        for each in described.rounds:
            await self._slice.spend(2 + len(each.arrivals) // _ARRIVALS_PER_ITEM)
            rounds.append(_serialized(each))
        fields = {name: _serialized(value) for name, value in vars(described).items() if name != "rounds"}
        part = _object({**fields, "rounds": b"[%b]" % b",".join(rounds)})
        self._parts[id(described)] = described, part
        return part


def request_of(query: Mapping[str, str], user: Identity) -> StatusRequest:
    """Returns the request in the query of a URL, with the names of GetServerStatusRequest and a lower-case order.

    Raises:
        InvalidArgumentError: A name is unknown, or a value is invalid.
        PermissionDeniedError: The user has no role in the container.
    """
    values: dict[str, str | int | Order] = {}
    for name, value in query.items():
        if name in _TEXTS:
            values[name] = value
        elif name in _NUMBERS:
            values[name] = _number(name, value)
        elif name == "order":
            allowed = [order.value for order in Order]
            if value not in allowed:
                raise InvalidArgumentError(f"expected one of {', '.join(allowed)}, got {value[:40]!r}", field="order")
            values[name] = Order(value)
        else:
            expected = ", ".join((*_TEXTS, *_NUMBERS, "order"))
            raise InvalidArgumentError(f"expected {expected} in the query, got {name[:40]!r}")
    return StatusRequest(user=user, **values)  # type: ignore[arg-type]


def log_request_of(query: Mapping[str, str]) -> LogRequest:
    """Returns the request for the log in the query of a URL, with the names of GetLogRequest.

    Raises:
        InvalidArgumentError: A name is unknown, or a value is invalid.
    """
    values: dict[str, str | int] = {}
    for name, value in query.items():
        if name in ("level", "contains"):
            values[name] = value
        elif name in ("max_lines", "after"):
            values[name] = _number(name, value)
        else:
            raise InvalidArgumentError(f"expected max_lines, level, contains, after in the query, got {name[:40]!r}")
    return LogRequest(**values)  # type: ignore[arg-type]


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise InvalidArgumentError(f"expected a whole number, got {value[:40]!r}", field=name)
    return int(value)


class Latest(Generic[T]):
    """The latest value of one kind. The server's loop makes one at a time, at a bounded rate, for all callers.

    Used on the event loop of the HTTP port only.
    """

    def __init__(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._loop = loop
        self._clock = clock
        self._making: asyncio.Task[T] | None = None
        self._valid_until = 0.0

    async def get(self) -> T:
        """Returns the latest value, a new one if there is none or it is too old."""
        making = self._making
        if making is None or (making.done() and self._clock() >= self._valid_until):
            making = self._making = asyncio.create_task(self._made())
        return await asyncio.shield(making)

    async def close(self) -> None:
        """Ends what is under way."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def _made(self) -> T:
        began = self._clock()
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._make(), self._loop))
        finally:
            # The busier the server is, the longer this took, and the longer the pause.
            now = self._clock()
            self._valid_until = now + max(EVERY_SECONDS, REST * (now - began))


def _has_result(task: asyncio.Task[bytes]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _object(fields: Mapping[str, bytes]) -> bytes:
    return b"{%b}" % b",".join([b'"%b":%b' % (name.encode(), value) for name, value in fields.items()])


def _serialized(value: object) -> bytes:
    encode = partial(json.dumps, default=vars, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return encode(value).encode()
    except ValueError:  # what workers have measured may be any number
        return encode(_with_texts(value)).encode()


def _with_texts(value: object) -> object:
    """Returns a value with texts in place of NaN and infinities, which JSON has not, as protobuf writes them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if dataclasses.is_dataclass(value):
        return _with_texts(vars(value))
    if isinstance(value, Mapping):
        return {name: _with_texts(each) for name, each in value.items()}
    return [_with_texts(each) for each in value] if isinstance(value, list | tuple) else value


HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "gradserve",
    "X-Content-Type-Options": "nosniff",
}
"""The headers that every answer has."""
_HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(:[0-9]{1,5})?")
EVENT_SECONDS = 1.0
"""The pause between two events."""
_MOST_VIEWERS = 64
_JSON = "application/json; charset=utf-8"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_STATUS = {UnauthenticatedError: 401, PermissionDeniedError: 403, ResourceExhaustedError: 503}


class Views:
    """Answers requests that the guard accepts."""

    def __init__(self, guard: Guard, pictures: Pictures, figures: Latest[Figures], logs: LogMemory) -> None:
        self._guard = guard
        self._pictures = pictures
        self._figures = figures
        self._logs = logs
        self._exposition = Exposition()
        self._page = _page_files()
        self._num_viewers = 0
        self._closing = asyncio.Event()
        self._views = {
            "/metrics": self._metrics,
            "/api/status": self._status,
            "/api/events": self._events,
            "/api/what-if": self._what_if,
            "/api/logs": self._log_lines,
            "/healthz": self._health,
        }

    async def answer(self, request: Request) -> Answer:
        """Returns the answer to a request.

        Raises:
            HeadError: See `Guard.check`.
        """
        self._guard.check(request)
        try:
            return await self._views.get(request.path, self._file)(request)
        except ServiceError as error:
            return refusal(error)

    async def close(self) -> None:
        """Ends all answers in progress."""
        self._closing.set()
        await self._pictures.close()
        await self._figures.close()

    async def _metrics(self, request: Request) -> Answer:
        """Answers with all metrics, as Prometheus text or as OpenMetrics."""
        self._guard.overseer(request)
        text, content_type = self._exposition.text(await self._figures.get(), request.header("accept"))
        return Answer(200, text, content_type)

    async def _status(self, request: Request) -> Answer:
        """Answers with a picture of the server, as JSON."""
        wanted = request_of(request.query, self._guard.identity(request))
        if request.method == "HEAD":
            return Answer(200, b"", _JSON, more=_nothing())
        return Answer(200, await self._pictures.json(wanted), _JSON)

    async def _what_if(self, request: Request) -> Answer:
        """Answers with replayed rounds, as JSON."""
        wanted = request_of(request.query, self._guard.identity(request))
        if request.method == "HEAD":
            return Answer(200, b"", _JSON, more=_nothing())
        return Answer(200, await self._pictures.what_if(wanted), _JSON)

    async def _log_lines(self, request: Request) -> Answer:
        """Answers with the latest lines of the log, as JSON; only to admins of all containers."""
        check_reader(self._guard.identity(request))
        wanted = log_request_of(request.query)
        if request.method == "HEAD":
            return Answer(200, b"", _JSON, more=_nothing())
        lines = [dataclasses.asdict(each) for each in self._logs.latest(wanted)]
        return Answer(200, _serialized({"lines": lines}), _JSON)

    async def _events(self, request: Request) -> Answer:
        """Answers with a picture of the server every second, as server-sent events, until the client leaves."""
        wanted = request_of(request.query, self._guard.identity(request))
        content_type = "text/event-stream; charset=utf-8"
        if request.method == "HEAD":
            return Answer(200, b"", content_type, more=_nothing())
        if self._num_viewers >= _MOST_VIEWERS:
            raise ResourceExhaustedError(f"{_MOST_VIEWERS} viewers are connected already")
        self._num_viewers += 1
        try:
            first = _event(await self._pictures.json(wanted))
        except BaseException:
            self._end_viewing()
            raise
        return Answer(200, first, content_type, more=self._later_events(request), end=self._end_viewing)

    async def _later_events(self, request: Request) -> AsyncIterator[bytes]:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), EVENT_SECONDS)
                return
            try:
                # Checked for each event, because the caller's role may have changed.
                wanted = request_of(request.query, self._guard.identity(request))
                event = _event(await self._pictures.json(wanted))
            except ResourceExhaustedError:
                continue
            except ServiceError:
                return
            yield event

    def _end_viewing(self) -> None:
        self._num_viewers -= 1

    async def _health(self, _request: Request) -> Answer:
        """Answers while the port is open."""
        return Answer(200, b"ok\n")

    async def _file(self, request: Request) -> Answer:
        """Answers with a file of the status page."""
        name = request.path.removeprefix("/") or "index.html"
        body = self._page.get(name)
        if body is None:
            return Answer(404, b"there is nothing of this name; see / for the status page\n")
        return Answer(200, body, f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")


class Guard:
    """Checks every request before a view sees it.

    It allows only requests that change nothing. The Host header must be an IP address, localhost or a configured name.
    This stops DNS rebinding, in which a page of another site sends its own name, which resolves to this server. No
    header of an answer lets pages of other sites read it.
    """

    def __init__(
        self, identify: Callable[[Credentials], Identity], *, asks_for_token: bool, hosts: tuple[str, ...]
    ) -> None:
        self._identify = identify
        self._asks_for_token = asks_for_token
        self._hosts = frozenset(name.casefold().rstrip(".") for name in (*hosts, "localhost"))

    def check(self, request: Request) -> None:
        """Checks a request.

        Raises:
            HeadError: It is not GET or HEAD, or names another host.
        """
        if request.method not in ("GET", "HEAD"):
            raise HeadError(405, "only GET is possible here")
        hosts = request.headers.get("host", ())
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            shown = ", ".join(hosts)[:100] or "nothing"
            raise HeadError(
                421, f"expected an IP address, localhost or a name given with --http-host as the Host, got {shown!r}"
            )

    def identity(self, request: Request) -> Identity:
        """Returns the sender of a request.

        Raises:
            UnauthenticatedError: It carries no token, or an unknown one.
        """
        if not self._asks_for_token:
            return self._identify(Credentials())
        values = request.headers.get("authorization", ())
        if not values:
            raise UnauthenticatedError("expected the header Authorization: Bearer TOKEN")
        return self._identify(in_authorization(values))

    def overseer(self, request: Request) -> Identity:
        """Returns the sender of a request for metrics of all containers.

        Raises:
            UnauthenticatedError: See `identity`.
            PermissionDeniedError: The sender has no role in all containers.
        """
        identity = self.identity(request)
        if ALL_CONTAINERS not in identity.roles:
            raise PermissionDeniedError(f'metrics need a role in all containers ("*"); {identity.name!r} has none')
        return identity

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["address"] or found["name"]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.casefold().rstrip(".") in self._hosts
        return True


def refusal(error: ServiceError) -> Answer:
    """Returns the answer for an error."""
    status = _STATUS.get(type(error), 400)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status, {})
    message = error.message if error.field is None else f"{error.field}: {error.message}"
    return Answer(status, json.dumps({"error": message}).encode(), _JSON, headers)


async def _nothing() -> AsyncIterator[bytes]:
    """Yields nothing: an answer to HEAD has no body."""
    body: tuple[bytes, ...] = ()
    for each in body:
        yield each


def _event(picture: bytes) -> bytes:
    return b"data: " + picture + b"\n\n"


def _page_files() -> Mapping[str, bytes]:
    folder = resources.files("gradserve_server.observe.http") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES}
