"""The gradient of one call at an aggregator, until the call is answered."""

import asyncio
from typing import Generic, TypeVar

from gradserve_server.accumulators.gradient import Contribution, Gradient

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class Leaf(Generic[RequestT, AnswerT]):
    """A gradient that somebody upstream answers, alone or with others.

    Used on the event loop only.

    Attributes:
        request: The request, without its tensors.
        contribution: The sender, step and weight of the gradient.
        gradient: The gradient, from when it is open.
        deadline: The time of the event loop at which its caller stops waiting; None for never.
        answer: A future of the answer.
    """

    def __init__(self, request: RequestT, contribution: Contribution, deadline: float | None) -> None:
        """Takes what the call says."""
        loop = asyncio.get_running_loop()
        self.request = request
        self.contribution = contribution
        self.deadline = deadline
        self.gradient: Gradient | None = None
        self.answer: asyncio.Future[AnswerT] = loop.create_future()
        self.answer.add_done_callback(_retrieve)
        self._released: asyncio.Future[None] = loop.create_future()
        self._was_heard = False
        self._listeners = 0
        self._is_added_up = False

    async def wait(self, timeout: float | None) -> AnswerT:
        """Waits for the answer.

        Raises:
            TimeoutError: There was none within `timeout` seconds.
            ServiceError: It is an error.
        """
        self._was_heard = True
        self._listeners += 1
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self.answer)
        finally:
            self._listeners -= 1
            if self._is_added_up and not self._listeners:
                _set(self._released)

    async def released(self) -> None:
        """Waits until the gradient is no longer needed, and forgets it.

        Raises:
            ServiceError: The call has failed; whatever it was to release is kept.
        """
        try:
            await self._released
        finally:
            self.gradient = None
        if self.answer.done():
            self.answer.result()

    def added_up(self) -> None:
        """Notes that the gradient is in a sum: it is needed only as long as its caller may have to send it alone."""
        self._is_added_up = True
        if self.is_left:
            _set(self._released)

    def succeed(self, answer: AnswerT) -> None:
        """Answers."""
        if not self.answer.done():
            self.answer.set_result(answer)
        _set(self._released)

    def fail(self, error: Exception) -> None:
        """Answers with an error, unless there is an answer already."""
        if not self.answer.done():
            self.answer.set_exception(error)
        _set(self._released)

    @property
    def is_left(self) -> bool:
        """True once nobody waits for the answer any more."""
        return self._was_heard and not self._listeners


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _retrieve(done: asyncio.Future[AnswerT]) -> None:
    """Retrieves an exception for which nobody may be waiting."""
    if not done.cancelled():
        done.exception()
