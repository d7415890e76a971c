"""The pages of the HTTP port."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources

from aiohttp import web

from gradserve_server.observe.http.guard import Guard
from gradserve_server.observe.http.pictures import EVERY_SECONDS, Pictures, request_of
from gradserve_server.observe.metrics.exposition import Exposition

_MOST_VIEWERS = 64
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class Views:
    """Answers requests that the guard has let through."""

    def __init__(self, guard: Guard, pictures: Pictures, exposition: Exposition) -> None:
        """Takes what finds out who asks, and what there is to see."""
        self._guard = guard
        self._pictures = pictures
        self._exposition = exposition
        self._page = _page_files()
        self._num_viewers = 0
        self._closing = asyncio.Event()

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        """The paths and what answers them."""
        return [
            web.get("/metrics", self.metrics),
            web.get("/api/status", self.status),
            web.get("/api/events", self.events),
            web.get("/healthz", self.health),
            web.get("/{name:[a-z_.-]*}", self.page),
        ]

    async def metrics(self, request: web.Request) -> web.Response:
        """Answers with all metrics, as Prometheus text or as OpenMetrics."""
        self._guard.overseer(request)
        text, content_type = self._exposition.text(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def status(self, request: web.Request) -> web.Response:
        """Answers with a picture of the server, as JSON."""
        wanted = request_of(request.query, self._guard.identity(request))
        return web.Response(body=await self._pictures.json(wanted), content_type="application/json")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Sends a picture of the server every second, as server-sent events, until the client leaves."""
        self._guard.identity(request)
        if self._num_viewers >= _MOST_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{_MOST_VIEWERS} others are looking already\n")
        self._num_viewers += 1
        try:
            return await self._stream(request)
        finally:
            self._num_viewers -= 1

    async def health(self, _request: web.Request) -> web.Response:
        """Answers while the port is open."""
        return web.Response(text="ok\n")

    async def page(self, request: web.Request) -> web.Response:
        """Answers with a file of the status page."""
        name = request.match_info["name"] or "index.html"
        body = self._page.get(name)
        if body is None:
            raise web.HTTPNotFound(text="there is nothing of this name; see / for the status page\n")
        return web.Response(body=body, content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8")

    async def close(self) -> None:
        """Ends what is under way."""
        self._closing.set()
        await self._pictures.close()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        while not self._closing.is_set():
            # Each time anew: the caller's role may have changed.
            picture = await self._pictures.json(request_of(request.query, self._guard.identity(request)))
            if not response.prepared:
                await response.prepare(request)
            try:
                await response.write(b"data: " + picture + b"\n\n")
            except ConnectionError:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), EVERY_SECONDS)
        return response


def _page_files() -> Mapping[str, bytes]:
    folder = resources.files("gradserve_server.observe.http") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES}
