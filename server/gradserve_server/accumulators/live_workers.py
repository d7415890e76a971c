"""Finds worker ids that two clients use at once."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.errors import InvalidArgumentError

_GRACE_SECONDS = 1.0
"""How long the end of a connection may take to arrive here after its client has died."""


@dataclass(eq=False)
class _Pulling:
    """The push_pulls of one client with one worker_id.

    Attributes:
        client: The client.
        num_calls: The number of its calls that are under way.
        over: Resolved at the end of the last of them: True if its caller has left. None: nobody asks.
    """

    client: str
    num_calls: int = 0
    over: asyncio.Future[bool] | None = None


class LiveWorkers:
    """The clients whose push_pulls are under way on one accumulator, by worker_id.

    The call of a client that is waiting shows that the client lives: a second client with its worker_id is not the same
    worker, started again, but another one, whose gradients would be dropped. Calls without a request id do not show
    which client they are of.
    """

    def __init__(self, name: str) -> None:
        """Takes the accumulator's name, for messages."""
        self._name = name
        self._pulling: dict[str, _Pulling] = {}

    def pulling(self, call: RequestId | None, contribution: Contribution) -> AbstractContextManager[None]:
        """Notes for the length of a block that the client of a push_pull lives."""
        if call is None or (not contribution.sum_of and not contribution.worker_id):
            return _Noted(self._pulling, ())
        if not contribution.sum_of:
            return _Noted(self._pulling, ((contribution.worker_id, call.owner),))
        named = [(each.worker_id, each.call.owner) for each in contribution.sum_of if each.worker_id and each.call]
        return _Noted(self._pulling, named)

    async def check(self, call: RequestId | None, contribution: Contribution, timeout: float | None) -> None:
        """Checks that no other client is waiting with the worker_id of a gradient that counts once for its worker.

        If there is one, waits for a moment, for at most `timeout` seconds: of a worker that was killed and started
        again, the new connection may arrive before the end of the old one. A sum is not checked: one with a worker that
        is in the round already is refused, and comes one by one.

        Raises:
            InvalidArgumentError: There is one, and it lives.
        """
        worker_id = contribution.worker_id
        while call is not None and worker_id and not contribution.sum_of:
            other = self._pulling.get(worker_id)
            if other is None or other.client == call.owner:
                return
            if other.over is None:
                other.over = asyncio.get_running_loop().create_future()
            has_left = False
            try:
                async with asyncio.timeout(_GRACE_SECONDS if timeout is None else min(timeout, _GRACE_SECONDS)):
                    has_left = await asyncio.shield(other.over)
            except TimeoutError:
                pass
            if not has_left:
                raise InvalidArgumentError(
                    f"two clients use worker_id {worker_id!r} at once: accumulator {self._name!r} counts each worker "
                    "once a round, and another client is waiting there with this id; expected a worker_id that no "
                    "other running worker has",
                    field="worker_id",
                )


class _Noted(AbstractContextManager[None]):
    """Workers whose push_pulls are under way."""

    __slots__ = ("_all", "_named", "_noted")

    def __init__(self, pulling: dict[str, _Pulling], named: Sequence[tuple[str, str]]) -> None:
        self._all = pulling
        self._named = named
        self._noted: list[tuple[str, _Pulling]] = []

    def __enter__(self) -> None:
        for worker_id, client in self._named:
            known = self._all.setdefault(worker_id, _Pulling(client))
            if known.client == client:
                known.num_calls += 1
                self._noted.append((worker_id, known))

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for worker_id, known in self._noted:
            known.num_calls -= 1
            if not known.num_calls:
                del self._all[worker_id]
                if known.over is not None:
                    known.over.set_result(kind is not None and issubclass(kind, asyncio.CancelledError))
