"""Pictures of the server as JSON, shared by all who look at the same."""

import asyncio
import json
from collections.abc import Mapping

from gradserve_server.devices.compute import Compute
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.observe.status.request import Order, StatusRequest
from gradserve_server.observe.status.server import StatusSource
from gradserve_server.security.identity import Identity

EVERY_SECONDS = 1.0
"""How often there is a new picture."""
_NUMBERS = ("max_accumulators", "max_rounds", "max_workers")
_TEXTS = ("container", "name_contains")


def request_of(query: Mapping[str, str], user: Identity) -> StatusRequest:
    """Returns what the query of a URL asks for: the names of GetServerStatusRequest, and the order in lower case.

    Raises:
        InvalidArgumentError: A name is unknown, or a value is not possible.
        PermissionDeniedError: The user has no role in the container.
    """
    values: dict[str, str | int | Order] = {}
    for name, value in query.items():
        if name in _TEXTS:
            values[name] = value
        elif name in _NUMBERS:
            if not (value.isascii() and value.isdigit() and len(value) < 10):
                raise InvalidArgumentError(f"expected a whole number, got {value[:40]!r}", field=name)
            values[name] = int(value)
        elif name == "order":
            allowed = [order.value for order in Order]
            if value not in allowed:
                raise InvalidArgumentError(f"expected one of {', '.join(allowed)}, got {value[:40]!r}", field="order")
            values[name] = Order(value)
        else:
            expected = ", ".join((*_TEXTS, *_NUMBERS, "order"))
            raise InvalidArgumentError(f"expected {expected} in the query, got {name[:40]!r}")
    return StatusRequest(user=user, **values)  # type: ignore[arg-type]


class Pictures:
    """Takes pictures, at most one a second of each kind, however many look at it. Used on the event loop only."""

    def __init__(self, source: StatusSource, compute: Compute) -> None:
        """Takes what takes pictures, and threads."""
        self._source = source
        self._compute = compute
        self._latest: dict[StatusRequest, asyncio.Task[bytes]] = {}

    async def json(self, request: StatusRequest) -> bytes:
        """Returns a picture as JSON with the names of GetServerStatusResponse, not older than a second."""
        taking = self._latest.get(request)
        if taking is None:
            taking = self._latest[request] = asyncio.create_task(self._take(request))
            asyncio.get_running_loop().call_later(EVERY_SECONDS, self._latest.pop, request, None)
        return await asyncio.shield(taking)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._latest.values():
            task.cancel()
        await asyncio.gather(*self._latest.values(), return_exceptions=True)

    async def _take(self, request: StatusRequest) -> bytes:
        status = await self._source.picture(request)
        return await self._compute.run_in_thread(_serialized, status)


def _serialized(status: object) -> bytes:
    return json.dumps(status, default=vars, separators=(",", ":"), ensure_ascii=False).encode()
