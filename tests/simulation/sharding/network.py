"""A network between each client and each server: late, twice, cut off one by one, or losing what it carries."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from gradserve_protocol import errors
from gradserve_server.errors import ServiceError
from tests.simulation.sharding.run import Run

_DELAYS = [0.0, 0.0, 0.001, 0.02, 0.3]
_SHORT_DELAYS = [0.0, 0.001, 0.02]
_LOSS = 0.03
"""How likely a message is lost, in each direction."""
_SECOND_COPY = 0.08
"""How likely a request arrives twice: its connection broke, and it was sent again over another one."""
_KEEPALIVE = 3.0
"""Seconds after which a client or a server finds out that the other one is silent."""


class Network:
    """Carries requests to servers, and answers back.

    Attributes:
        runs: What serves at each address now; None while nothing does.
        faults: How often each fault happened.
    """

    def __init__(
        self, chance: random.Random, size: int, on_error: Callable[[BaseException], object], *, is_calm: bool = False
    ) -> None:
        """Takes what is told of errors that are no answers, and whether messages are fast and rarely lost."""
        self._chance = chance
        self._on_error = on_error
        self._delays, self._loss = (_SHORT_DELAYS, _LOSS / 10) if is_calm else (_DELAYS, _LOSS)
        self.runs: list[Run | None] = [None] * size
        self.faults: Counter[str] = Counter()
        self._cut: set[tuple[str, int]] = set()
        self._under_way: set[asyncio.Task[None]] = set()
        self.is_healed = False

    def cut(self, client: str, target: int) -> None:
        """Loses all messages between a client and a server from now on."""
        self.faults["a client is cut off from a server"] += 1
        self._cut.add((client, target))

    def mend(self) -> None:
        """Ends all partitions."""
        self._cut.clear()

    def heal(self) -> None:
        """Loses, doubles and delays nothing any more."""
        self.mend()
        self.is_healed = True

    async def ask(self, client: str, target: int, name: str, data: bytes, timeout: float | None) -> bytes:
        """Returns the first answer that arrives, in bytes.

        Args:
            client: Who asks.
            target: The index of the server.
            name: The method, with its service.
            data: The request.
            timeout: Seconds to wait; None for no limit.

        Raises:
            GradserveError: The server's error; UnavailableError, if no answer can arrive any more.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        copies = [self._begin(client, target, name, data, answer)]
        if not self.is_healed and self._chance.random() < _SECOND_COPY:
            self.faults["a request is doubled"] += 1
            copies.append(self._begin(client, target, name, data, answer))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise errors.DeadlineExceededError(f"no answer from server {target} in {timeout:.1f} s") from None
        finally:
            answer.cancel()
            for each in copies:
                if not each.done():
                    self._later(self._tell_gone(client, target, each))

    def _begin(
        self, client: str, target: int, name: str, data: bytes, answer: "asyncio.Future[bytes]"
    ) -> "asyncio.Task[None]":
        return self._later(self._carry(client, target, name, data, answer))

    def _later(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def _carry(self, client: str, target: int, name: str, data: bytes, answer: "asyncio.Future[bytes]") -> None:
        arrived = await self._arrives(client, target, "a request is lost")
        run = self.runs[target]
        if not arrived or run is None:
            if arrived:
                self.faults["a server is not there"] += 1
            else:
                await asyncio.sleep(_KEEPALIVE)
            _fail(answer, errors.UnavailableError(f"server {target} cannot be reached"))
            return
        serving = run.begin(run.answer(name, data))
        silent = 0.0
        try:
            while not serving.done() and not run.is_gone and silent < _KEEPALIVE:
                await asyncio.wait([serving], timeout=0.5)
                silent = silent + 0.5 if (client, target) in self._cut else 0.0
        except asyncio.CancelledError:
            serving.cancel()
            raise
        if run.is_gone or not serving.done():
            serving.cancel()
            _fail(answer, errors.UnavailableError(f"the connection to server {target} broke"))
            return
        reply: bytes | errors.GradserveError
        try:
            reply = serving.result()
        except ServiceError as error:
            reply = _error(error)
        except asyncio.CancelledError:
            reply = errors.UnavailableError(f"server {target} has cancelled the call")
        if not await self._arrives(client, target, "an answer is lost"):
            await asyncio.sleep(_KEEPALIVE)
            _fail(answer, errors.UnavailableError(f"server {target} has fallen silent"))
        elif isinstance(reply, bytes):
            if not answer.done():
                answer.set_result(reply)
        else:
            _fail(answer, reply)

    async def _arrives(self, client: str, target: int, fault: str) -> bool:
        await asyncio.sleep(0.0 if self.is_healed else self._chance.choice(self._delays))
        if (client, target) in self._cut or (not self.is_healed and self._chance.random() < self._loss):
            self.faults[fault] += 1
            return False
        return True

    async def _tell_gone(self, client: str, target: int, copy: "asyncio.Task[None]") -> None:
        """Ends what a server does for a caller who has gone away, once it hears of that."""
        is_cut = (client, target) in self._cut
        await asyncio.sleep(_KEEPALIVE if is_cut else self._chance.choice(self._delays))
        if copy.cancel():
            self.faults["a call is cancelled"] += 1


def _fail(answer: "asyncio.Future[bytes]", error: errors.GradserveError) -> None:
    if not answer.done():
        answer.set_exception(error)


def _error(error: ServiceError) -> errors.GradserveError:
    """Returns the error of a server as clients raise it."""
    kind = getattr(errors, type(error).__name__)
    if getattr(error, "retry_after", None) is not None:
        made: errors.GradserveError = errors.ResourceExhaustedError(error.message, field=error.field)
        return made
    raised: errors.GradserveError = kind(error.message, field=error.field)
    return raised
