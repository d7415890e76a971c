"""Incarnations of sharded accumulators, of which servers can tell which one is later."""

import re
from collections.abc import Callable
from typing import Protocol

from gradserve_server.errors import AbortedError, InvalidArgumentError, NotFoundError
from gradserve_server.limits import MAX_NAME_BYTES, check_length

_NUMBER_DIGITS, _RANDOM_DIGITS = 16, 16
_PLACE_DIGITS = _NUMBER_DIGITS + _RANDOM_DIGITS
_ORDERED = re.compile(rf"[0-9a-f]{{{_PLACE_DIGITS},}}")
_MOST = 1 << 62
"""Numbers of incarnations are smaller, so that there are always greater ones that fit into 63 bits."""


class RecordedNumber(Protocol):
    """Remembers a number for longer than the server runs.

    Attributes:
        newest_number: The number that was remembered when the server started; 0 if there is none.
    """

    newest_number: int

    def note_number(self, number: int) -> None:
        """Remembers a number, once `settle` has returned."""
        ...


class OrderedIncarnations:
    """Makes the incarnations of sharded accumulators at their home.

    Each is later than all that this server has made, and that earlier runs of it have recorded. Without a state
    directory, those of earlier runs are earlier because the clock goes on.
    """

    def __init__(self, new_id: Callable[[], str], now: Callable[[], int], recorded: RecordedNumber) -> None:
        """Takes what makes ids that nothing else has, the time in nanoseconds since 1970, and what remembers numbers.

        The ids have hexadecimal digits.
        """
        self._new_id = new_id
        self._now = now
        self._recorded = recorded
        self._newest = recorded.newest_number

    def new(self) -> str:
        """Returns an incarnation that is later than all before."""
        self._newest = max(self._newest + 1, self._now())
        self._recorded.note_number(self._newest)
        return _with_number(self._new_id().zfill(_PLACE_DIGITS), self._newest)

    def restored(self, incarnation: str) -> None:
        """Notes an accumulator that was there before; its home may have been another server then."""
        self._newest = max(self._newest, min(_number_of(incarnation), _MOST - 1))


def is_incarnation(text: str) -> bool:
    """Returns True if a text looks like the incarnation of an accumulator."""
    return _ORDERED.fullmatch(text) is not None


def check_ordered(incarnation: str, field: str) -> None:
    """Checks that a home can have made an incarnation.

    Raises:
        InvalidArgumentError: It is none, or too long.
    """
    check_length(incarnation, MAX_NAME_BYTES, field)
    if _ORDERED.fullmatch(incarnation) is None or _number_of(incarnation) >= _MOST:
        given = repr(incarnation[:100]) if incarnation else "an empty one"
        raise InvalidArgumentError(f"expected the incarnation at the home, got {given}", field=field)


def is_later(first: str, second: str) -> bool:
    """Returns True if an incarnation is later than another one of the same accumulator."""
    return _place_of(first) > _place_of(second)


def latest_before(incarnation: str) -> str:
    """Returns an incarnation that is later than all before another one."""
    return _with_number(incarnation[:-_RANDOM_DIGITS] + "f" * _RANDOM_DIGITS, _number_of(incarnation) - 1)


def check_is_of(incarnation: str, name: str, here: str, field: str) -> None:
    """Checks that a request is for the incarnation of a sharded accumulator that is here.

    Args:
        incarnation: The one that the request is for.
        name: The accumulator's name, for messages.
        here: The one that is here.
        field: The field of the request.

    Raises:
        InvalidArgumentError: No home can have made it.
        AbortedError: It is earlier than the one here.
        NotFoundError: It is later: what is here is left of an earlier one, or the home has forgotten this one.
    """
    check_ordered(incarnation, field)
    if is_later(here, incarnation):
        raise earlier(name, field)
    if here != incarnation:
        raise NotFoundError(f"this server has only an earlier accumulator {name!r}", field=field)


def earlier(name: str, field: str) -> AbortedError:
    """Returns the error for a request for an earlier accumulator than the one that is known here."""
    return AbortedError(
        f"the call is for an accumulator {name!r} that was deleted, as this server knows a later one. If it was not, "
        "the clock of its home was set back: delete it and create it again",
        field=field,
    )


def is_of_earlier(error: AbortedError) -> bool:
    """Returns True for the errors of `earlier`, whose fields name the incarnation at the home."""
    return error.field is not None and error.field.rpartition(".")[2] == "home_incarnation"


def _place_of(incarnation: str) -> str:
    return incarnation[-_PLACE_DIGITS:]


def _number_of(incarnation: str) -> int:
    return int(incarnation[-_PLACE_DIGITS:-_RANDOM_DIGITS], 16)


def _with_number(id_: str, number: int) -> str:
    return f"{id_[:-_PLACE_DIGITS]}{max(number, 0):0{_NUMBER_DIGITS}x}{id_[-_RANDOM_DIGITS:]}"
