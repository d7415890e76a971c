"""Pictures of the server as JSON, shared by all who look at the same."""

import asyncio
import json
from collections.abc import Mapping

from gradserve.server_status import AccumulatorStatus
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError
from gradserve_server.observe.http.latest import Latest
from gradserve_server.observe.status.request import Order, StatusRequest
from gradserve_server.observe.status.server import Snapshot
from gradserve_server.security.identity import Identity

_MOST_PICTURES = 64
_MOST_BYTES = 64 << 20
_ARRIVALS_AT_ONCE = 1_000
"""After serializing so many gradients, others get their turn."""
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
    """Makes pictures of the latest snapshot, one of each kind, however many look at it, and one after the other.

    Used on the event loop of the HTTP port only.
    """

    def __init__(self, snapshots: Latest[Snapshot], most: int = _MOST_PICTURES, most_bytes: int = _MOST_BYTES) -> None:
        """Takes the snapshots, and the most pictures of one snapshot: their number, and their bytes together."""
        self._snapshots = snapshots
        self._most = most
        self._most_bytes = most_bytes
        self._making: dict[tuple[int, StatusRequest], asyncio.Task[bytes]] = {}
        self._snapshot: Snapshot | None = None
        self._turn = asyncio.Lock()
        self._parts: dict[int, tuple[AccumulatorStatus, bytes]] = {}
        self._num_arrivals = 0

    async def json(self, request: StatusRequest) -> bytes:
        """Returns a picture as JSON with the names of GetServerStatusResponse.

        Raises:
            ResourceExhaustedError: There are too many pictures, which all ask for something else.
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
            pieces = [await self._part(each) for each in status.accumulators]
            # Piece by piece: no other thread runs while one piece is serialized.
            fields = {name: _serialized(value) for name, value in vars(status).items() if name != "accumulators"}
            fields["accumulators"] = b"[%b]" % b",".join(pieces)
            return _object(fields)

    async def _part(self, accumulator: AccumulatorStatus) -> bytes:
        """Returns an accumulator as JSON, which several pictures have in common."""
        known = self._parts.get(id(accumulator))
        if known is not None:
            return known[1]
        rounds = []
        for each in accumulator.rounds:
            rounds.append(_serialized(each))
            self._num_arrivals += 10 + len(each.arrivals)
            if self._num_arrivals >= _ARRIVALS_AT_ONCE:
                self._num_arrivals = 0
                await asyncio.sleep(0)
        fields = {name: _serialized(value) for name, value in vars(accumulator).items() if name != "rounds"}
        part = _object({**fields, "rounds": b"[%b]" % b",".join(rounds)})
        self._parts[id(accumulator)] = accumulator, part
        return part


def _has_result(task: asyncio.Task[bytes]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _object(fields: Mapping[str, bytes]) -> bytes:
    return b"{%b}" % b",".join([b'"%b":%b' % (name.encode(), value) for name, value in fields.items()])


def _serialized(value: object) -> bytes:
    return json.dumps(value, default=vars, separators=(",", ":"), ensure_ascii=False).encode()
