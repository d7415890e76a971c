"""Answers workers that join, while this worker waits for a round."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from gradserve.errors import CallCancelledError, GradserveError, InvalidArgumentError, ResourceExhaustedError
from gradserve.lasting import lasting_thread
from gradserve.training.joining import Joining
from gradserve.training.state import Carried, State

_log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
"""How often each worker looks for requests."""
PATIENCE_SECONDS = 3.0
"""How long a request waits for the worker that the last round names, before any other answers it."""
_CLOSING_SECONDS = 1.0
_SLICE_SECONDS = 1.0
"""How long the attendant waits for the state to rest before it looks for roll calls again."""


class Attendant:
    """Looks for requests from time to time, and answers them while the state of this worker rests.

    A state that cannot be sent is the newcomer's problem, which is told why. This worker goes on, and logs it.

    All workers see a request. The one that answers is the first, by id, of those of the last round that do not wait for
    a state themselves. If it does not, because it has died or computes for long, others do.
    """

    def __init__(
        self,
        joining: Joining,
        worker_id: str,
        state: Callable[[], State | None],
        check_seconds: float = CHECK_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Takes where requests are, this worker's id and state, and times in seconds; `look` is called every time."""
        self._joining = joining
        self._worker_id = worker_id
        self._state = state
        self._check_seconds = check_seconds
        self._patience_seconds = patience_seconds
        self._look = look
        self._changed = threading.Condition()
        self._step: int | None = None
        """The step of the state while it rests, otherwise None."""
        self._members: Collection[str] = ()
        self._is_wanted = False
        """Whether the state is to be copied before it changes again."""
        self._is_closed = False
        self._problem = ""
        """Why the state could not be sent the last time, as the log has it already."""
        self._thread = lasting_thread("answering workers that join", self._attend, _log, "gradserve-joining")

    @contextmanager
    def at_rest(self, step: int, members: Collection[str]) -> Iterator[None]:
        """Answers requests during a block, in which the state does not change.

        Args:
            step: The step that the state belongs to.
            members: The ids of the workers of the round that led to it.
        """
        with self._changed:
            self._step, self._members = step, members
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_wanted)
                self._step = None

    def use(self, joining: Joining) -> None:
        """Looks for requests elsewhere from now on: after a restart of the server."""
        self._joining = joining

    def close(self) -> None:
        """Ends the thread. If a call of it waits for a server that is gone, it ends with the client at the latest."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_SECONDS)

    def _attend(self) -> None:
        seen_at: float | None = None
        logged = ""
        while not self._is_closed:
            try:
                self._look()
                requesters = self._joining.requesters()
                now = time.monotonic()
                seen_at = (now if seen_at is None else seen_at) if requesters else None
                if seen_at is not None and self._is_called(requesters, now - seen_at) and self._answer():
                    seen_at = None
            except CallCancelledError:
                return  # the client is closed
            except GradserveError as error:
                if str(error) != logged:
                    _log.warning("workers that want to join could not be answered: %s", error)
                logged = str(error)
            else:
                logged = ""
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, self._check_seconds)

    def _is_called(self, requesters: Collection[str], waited: float) -> bool:
        if self._worker_id in requesters:
            return False
        able = sorted(set(self._members) - set(requesters))
        return able[:1] == [self._worker_id] or waited >= self._patience_seconds

    def _answer(self) -> bool:
        """Copies the state at the next rest, and sends it, or says why not; returns False if it is not at hand."""
        step, carried, problem = self._copied()
        if step is None or (carried is None and problem is None):
            return False
        if not self._joining.requesters():
            return True  # another worker was faster
        if carried is not None:
            try:
                self._joining.answer(carried, step)
            except (InvalidArgumentError, ResourceExhaustedError) as error:
                problem = error  # it would be the same the next time
        if problem is not None:
            self._say(problem)
        return True

    def _copied(self) -> tuple[int | None, Carried | None, Exception | None]:
        """Returns the step and a copy of the state at the next rest, or what was wrong with it."""
        with self._changed:
            self._is_wanted = True
            try:
                self._wait_for_rest()
                state = None if self._step is None else self._state()
                return self._step, None if state is None else Carried.of(state), None
            except Exception as error:  # of what the caller has written, and of what the state has in it
                return self._step, None, error
            finally:
                self._is_wanted = False
                self._changed.notify_all()

    def _wait_for_rest(self) -> None:
        """Returns when the state rests, or the attendant is closed; answers roll calls meanwhile. Holds the lock."""
        while not self._changed.wait_for(lambda: self._is_closed or self._step is not None, _SLICE_SECONDS):
            self._changed.release()
            try:
                self._joining.requesters()
            except GradserveError:
                return
            finally:
                self._changed.acquire()

    def _say(self, problem: Exception) -> None:
        """Tells those who wait for a state, and the log, once, why this worker cannot send its own: it goes on."""
        text = f"{problem}" if isinstance(problem, GradserveError) else f"{type(problem).__qualname__}: {problem}"
        if text != self._problem:
            unknown = None if isinstance(problem, GradserveError) else problem
            _log.warning(
                "worker %r cannot send its state to workers that join: %s", self._worker_id, text, exc_info=unknown
            )
        self._problem = text
        self._joining.refuse(text)
