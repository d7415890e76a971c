"""The gradient of one call at an aggregator, until the call is answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, NamedTuple, TypeVar

from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.errors import AbortedError
from gradserve_server.runtime.event_loop import retrieve

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class _Loan(NamedTuple):
    """A gradient as one caller has brought it, and a future of its return."""

    gradient: Gradient
    returned: asyncio.Future[None]


class Leaf(Generic[RequestT, AnswerT]):
    """A gradient that somebody upstream answers, alone or with others.

    Its caller may go, and call again: then the gradient is read where the latest call has it, and that call gets the
    answer, too.

    Used on the event loop only.

    Attributes:
        request: The request, without its tensors.
        contribution: The sender, step and weight of the gradient.
        deadline: The time of the event loop at which the last caller stops waiting; None for never.
        answer: A future of the answer.
    """

    def __init__(self, request: RequestT, contribution: Contribution) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.contribution = contribution
        self.deadline: float | None = loop.time()
        self.answer: asyncio.Future[AnswerT] = loop.create_future()
        self.answer.add_done_callback(retrieve)
        self._loans: list[_Loan] = []
        self._lent = asyncio.Event()
        self._num_bringing = 0
        self._num_reading = 0
        self._was_heard = False
        self._listeners = 0
        self._is_added_up = False

    # For its callers

    async def wait(self, timeout: float | None) -> AnswerT:
        """Waits for the answer.

        Raises:
            TimeoutError: There was none within `timeout` seconds.
            ServiceError: It is an error.
        """
        if timeout is None or self.deadline is None:
            self.deadline = None
        else:
            self.deadline = max(self.deadline, asyncio.get_running_loop().time() + timeout)
        self._was_heard = True
        self._listeners += 1
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self.answer)
        finally:
            self._listeners -= 1
            self._return_loans()

    def bring(self) -> None:
        """Notes that a caller is about to lend the gradient; `brought` must follow."""
        self._num_bringing += 1

    def brought(self) -> None:
        """Notes that the caller has lent the gradient, or has failed to."""
        self._num_bringing -= 1
        self._lent.set()

    def lend(self, gradient: Gradient) -> asyncio.Future[None]:
        """Lends the gradient in place of what earlier calls have lent; returns a future of its return.

        The future has the error of the call if it has failed: whatever the call was to release is kept.
        """
        loan = _Loan(gradient, asyncio.get_running_loop().create_future())
        self._loans.append(loan)
        self._lent.set()
        self._return_loans()
        return loan.returned

    # For who passes it on

    @property
    def gradient(self) -> Gradient | None:
        """The gradient, while somebody lends it."""
        return self._loans[-1].gradient if self._loans else None

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Gradient]:
        """Gives the gradient to a block, which may read it; waits for a caller that is bringing it again.

        Raises:
            AbortedError: All callers have gone.
        """
        while not self._loans:
            if not self._num_bringing:
                raise AbortedError("the caller left before its gradient was forwarded")
            self._lent.clear()
            await self._lent.wait()
        self._num_reading += 1
        try:
            yield self._loans[-1].gradient
        finally:
            self._num_reading -= 1
            self._return_loans()

    def added_up(self) -> None:
        """Notes that the gradient is in a sum: it is needed only as long as its caller may have to send it alone."""
        self._is_added_up = True
        self._return_loans()

    def succeed(self, answer: AnswerT) -> None:
        """Answers."""
        if not self.answer.done():
            self.answer.set_result(answer)
        self._return_loans()

    def fail(self, error: Exception) -> None:
        """Answers with an error, unless there is an answer already."""
        if not self.answer.done():
            self.answer.set_exception(error)
        self._return_loans()

    @property
    def is_left(self) -> bool:
        """True once nobody waits for the answer any more."""
        return self._was_heard and not self._listeners

    def _return_loans(self) -> None:
        """Returns the gradients that are not needed any more; those that somebody reads, later."""
        if self._num_reading:
            return
        is_over = self.answer.done() or (self._is_added_up and self.is_left)
        returned = self._loans if is_over else self._loans[:-1]
        self._loans = self._loans[len(returned) :]
        for _, future in returned:
            error = self.answer.exception() if self.answer.done() else None
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
