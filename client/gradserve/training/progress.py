"""Log messages of a worker about its part in a run."""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from gradserve.accumulators import GradientAccumulator

_log = logging.getLogger(__name__)

_FIRST_SECONDS, _NEXT_SECONDS = 5.0, 30.0
"""After how long a wait is logged, and how long after that again."""
_WINDOW = 20
"""The number of gradients of which most must have been dropped for a warning."""
_BETWEEN_WARNINGS = 100
"""The least number of gradients from one warning to the next."""


class WaitLog:
    """Says who is in and who is missing while a worker waits for its round."""

    def __init__(
        self, run: str, worker_id: str, num_required: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Logs waits for rounds of `num_required` gradients; the clock is in seconds."""
        self._run = run
        self._worker_id = worker_id
        self._num_required = num_required
        self._clock = clock
        self._wait: tuple[float, int, Collection[str]] | None = None
        self._next = _FIRST_SECONDS

    @contextmanager
    def waiting(self, step: int, members: Collection[str]) -> Iterator[None]:
        """The block in which the worker waits for the round of a step; `members` were in the round before."""
        self._next = _FIRST_SECONDS
        self._wait = (self._clock(), step, members)
        try:
            yield
        finally:
            self._wait = None

    def look(self, accumulator: GradientAccumulator) -> None:
        """Logs a wait that has lasted long enough. Called every now and then, by another thread.

        Raises:
            GradserveError: The accumulator cannot be asked.
        """
        wait = self._wait
        if wait is None or self._clock() - wait[0] < self._next:
            return
        began, step, members = wait
        self._next = self._clock() - began + _NEXT_SECONDS
        info = accumulator.info()
        if info.global_step != step or self._wait is not wait:
            return
        missing = sorted(set(members) - set(info.worker_ids))
        _log.info(
            "worker %r of training run %r has waited %.0f s at step %d: %d of %d gradients are in (workers: %s)%s",
            self._worker_id,
            self._run,
            self._clock() - began,
            step,
            info.num_accumulated,
            self._num_required,
            ", ".join(info.worker_ids) or "none",
            f"; missing of the round before: {', '.join(missing)}" if missing else "",
        )


class DropLog:
    """Logs gradients that were dropped, and warns if most of a worker's are."""

    def __init__(self, run: str, worker_id: str) -> None:
        self._run = run
        self._worker_id = worker_id
        self._latest: deque[bool] = deque(maxlen=_WINDOW)
        self._num_since_warning = _BETWEEN_WARNINGS

    def note(self, step: int, reached: int, *, was_dropped: bool) -> None:
        """Notes what became of the gradient of a step; `reached` is the step of the run by then."""
        self._latest.append(was_dropped)
        self._num_since_warning += 1
        if not was_dropped:
            return
        _log.info(
            "the gradient of worker %r at step %d of training run %r was dropped: its round had ended without it, and "
            "the run was at step %d",
            self._worker_id,
            step,
            self._run,
            reached,
        )
        if 2 * sum(self._latest) > _WINDOW and self._num_since_warning > _BETWEEN_WARNINGS:
            self._num_since_warning = 0
            _log.warning(
                "%d of the last %d gradients of worker %r of training run %r were dropped: the other workers are "
                "faster and end rounds without it, so most of its work is lost. Give it smaller batches, or start the "
                "run with a larger num_required",
                sum(self._latest),
                len(self._latest),
                self._worker_id,
                self._run,
            )
