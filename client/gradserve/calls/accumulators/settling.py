"""Waits until the gradients that a client keeps are durable."""

from gradserve.calls.accumulators.session import AccumulatorSession
from gradserve.calls.accumulators.watch import Watch
from gradserve.calls.exchange import Operation, Pause
from gradserve.errors import GradserveError, NotDurableError

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


def settle(watch: Watch, seconds: float) -> Operation[None]:
    """Waits until no gradient is kept of accumulators that outlive the client; then forgets them in any case.

    Args:
        watch: The client's accumulators.
        seconds: How long to wait at most; 0 asks nothing.

    Raises:
        NotDurableError: The time is over, or the server cannot be reached.
        LostError: A restart has lost something that the program has not been told.
    """
    left, pause = seconds, _FIRST_PAUSE_SECONDS
    while (sessions := _outliving(watch)) and left > 0:
        for session in sessions:
            try:
                yield from session.ask(at_most=left)
            except GradserveError:
                left = 0.0
        if left > 0 and _outliving(watch):
            pause = min(pause, left)
            yield Pause(pause)
            left, pause = left - pause, min(2 * pause, _LONGEST_PAUSE_SECONDS)
    error = not_durable(watch, seconds)
    for session in sessions:
        session.deleted()
    watch.check()
    if error is not None:
        raise error


def not_durable(watch: Watch, seconds: float) -> NotDurableError | None:
    """Returns the error that names what is not durable after some seconds; None if nothing is kept."""
    gradients = {each.ref.name: len(each.kept or ()) for each in _outliving(watch)}
    if not gradients:
        return None
    what = ", ".join(f"{count} of accumulator {name!r}" for name, count in gradients.items())
    return NotDurableError(
        f"the client was closed after {seconds:g} s, and of its gradients that the server has accepted, {what} are in "
        "rounds that have not ended, which a crash of the server would lose",
        gradients=gradients,
    )


def _outliving(watch: Watch) -> list[AccumulatorSession]:
    return [each for each in watch.keeping if not each.is_private]
