"""Pictures of the server as JSON, made once for all viewers that ask for the same."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from gradserve_protocol.server_status import AccumulatorStatus, ParametersStatus
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError
from gradserve_server.observe.status.request import Order, StatusRequest
from gradserve_server.observe.status.snapshot import Snapshot
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.security.identity import Identity

EVERY_SECONDS = 1.0
"""The greatest age of a value that callers share."""
REST = 20.0
"""After making a value, `Latest` pauses for at least this many times as long as that took."""
_MOST_PICTURES = 64
_MOST_BYTES = 64 << 20
_ARRIVALS_PER_ITEM = 4
"""The gradients that are serialized in the time of one item of a turn."""
_NUMBERS = ("max_accumulators", "max_rounds", "max_workers")
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
    return json.dumps(value, default=vars, separators=(",", ":"), ensure_ascii=False).encode()
