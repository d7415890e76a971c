"""What the HTTP port answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from importlib import resources

from gradserve_server.errors import (
    PermissionDeniedError,
    ResourceExhaustedError,
    ServiceError,
    UnauthenticatedError,
)
from gradserve_server.observe.http.exchange import Answer, Request
from gradserve_server.observe.http.guard import Guard
from gradserve_server.observe.http.latest import Latest
from gradserve_server.observe.http.pictures import Pictures, request_of
from gradserve_server.observe.metrics.exposition import Exposition
from gradserve_server.observe.status.figures import Figures

EVENT_SECONDS = 1.0
"""The pause between two events."""
_MOST_VIEWERS = 64
_JSON = "application/json; charset=utf-8"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_STATUS = {UnauthenticatedError: 401, PermissionDeniedError: 403, ResourceExhaustedError: 503}


class Views:
    """Answers requests that the guard has let through."""

    def __init__(self, guard: Guard, pictures: Pictures, figures: Latest[Figures]) -> None:
        """Takes what finds out who asks, and what there is to see."""
        self._guard = guard
        self._pictures = pictures
        self._figures = figures
        self._exposition = Exposition()
        self._page = _page_files()
        self._num_viewers = 0
        self._closing = asyncio.Event()
        self._views = {
            "/metrics": self._metrics,
            "/api/status": self._status,
            "/api/events": self._events,
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
        """Ends what is under way."""
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

    async def _events(self, request: Request) -> Answer:
        """Answers with a picture of the server every second, as server-sent events, until the client leaves."""
        wanted = request_of(request.query, self._guard.identity(request))
        content_type = "text/event-stream; charset=utf-8"
        if request.method == "HEAD":
            return Answer(200, b"", content_type, more=_nothing())
        if self._num_viewers >= _MOST_VIEWERS:
            raise ResourceExhaustedError(f"{_MOST_VIEWERS} others are looking already")
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
                # Each time anew: the caller's role may have changed.
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


def refusal(error: ServiceError) -> Answer:
    """Returns the answer that tells an error."""
    status = _STATUS.get(type(error), 400)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status, {})
    message = error.message if error.field is None else f"{error.field}: {error.message}"
    return Answer(status, json.dumps({"error": message}).encode(), _JSON, headers)


async def _nothing() -> AsyncIterator[bytes]:
    """Yields nothing: whoever asks for the head of an answer gets no body."""
    body: tuple[bytes, ...] = ()
    for each in body:
        yield each


def _event(picture: bytes) -> bytes:
    return b"data: " + picture + b"\n\n"


def _page_files() -> Mapping[str, bytes]:
    folder = resources.files("gradserve_server.observe.http") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES}
