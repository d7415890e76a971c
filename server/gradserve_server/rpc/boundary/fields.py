"""Fields that requests and replies of several services share: durations, lifetimes, durabilities, timeouts, pages."""

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import accumulator_pb2, lease_pb2
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_TOKEN_BYTES, quoted
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.storage.journal import Durability

_MAX_MARGIN_SECONDS = 0.2
_MAX_PAGE_SIZE = 1000
_MAX_PARTS = 1 << 12
"""The most parts, such as components, on a page: entries with many parts are spread over several pages."""

_DURABILITIES = {
    accumulator_pb2.DURABILITY_NONE: Durability.NONE,
    accumulator_pb2.DURABILITY_ROUND: Durability.ROUND,
    accumulator_pb2.DURABILITY_GRADIENT: Durability.GRADIENT,
}
_CODES = {durability: code for code, durability in _DURABILITIES.items()}

EntryT = TypeVar("EntryT")


def decode_duration(message: Any, field: str) -> float | None:
    """Returns a Duration field in seconds, None if it is unset."""
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    return duration.seconds + duration.nanos * 1e-9


def wait_timeout(request: Any, call: Call) -> float | None:
    """Returns the seconds for which a call may wait, None for no limit.

    That is the request's own `timeout`, but it ends a little before the call's deadline, so that an answer or a
    diagnosis still arrives in time.

    Raises:
        InvalidArgumentError: `timeout` is negative.
    """
    timeout = decode_duration(request, "timeout")
    if timeout is not None and timeout < 0:
        raise InvalidArgumentError(f"expected a timeout of at least 0, got {timeout:g} s", field="timeout")
    within = time_to_wait(call)
    if within is None:
        return timeout
    return within if timeout is None else min(timeout, within)


def time_to_wait(call: Call) -> float | None:
    """Returns the seconds until a little before the deadline of a call, None for no limit."""
    remaining = call.time_left()
    return None if remaining is None else max(remaining - min(_MAX_MARGIN_SECONDS, remaining / 10), 0.0)


def decode_lifetime(message: lease_pb2.Lifetime, user: Identity = ANONYMOUS) -> Lifetime:
    """Reads a lifetime.

    Raises:
        InvalidArgumentError: It is not a valid lifetime.
    """
    return Lifetime(user.own(message.owner_client_id), decode_duration(message, "idle_lease"))


def encode_idle_lease(lifetime: Lifetime) -> Duration | None:
    """Returns the idle lease of a lifetime, None if it has none."""
    return None if lifetime.idle_lease is None else encode_duration(lifetime.idle_lease)


def decode_durability(code: accumulator_pb2.Durability, field: str) -> Durability | None:
    """Returns the durability of a request, None if it asks for none.

    Raises:
        InvalidArgumentError: The code is unknown.
    """
    if not code:
        return None
    if code not in _DURABILITIES:
        raise InvalidArgumentError(f"expected a known durability, got {code}", field=field)
    return _DURABILITIES[code]


def encode_durability(durability: Durability | None) -> accumulator_pb2.Durability:
    """Returns the code of a durability."""
    return accumulator_pb2.DURABILITY_UNSPECIFIED if durability is None else _CODES[durability]


@dataclass(frozen=True)
class Page:
    """The bounds of one page of a list.

    Attributes:
        after: The key of the last entry on the page before; empty for the first page.
        size: The most entries.
    """

    after: str
    size: int

    def filled(self, found: Sequence[EntryT], weight: Callable[[EntryT], int]) -> Sequence[EntryT]:
        """Returns as many of the entries as fit on the page, and at least one if there are any.

        Args:
            found: The entries from here on, one more than the size of the page if there are that many.
            weight: Returns the number of parts that an entry has in the reply.
        """
        room = _MAX_PARTS
        for index, entry in enumerate(found[: self.size]):
            room -= weight(entry)
            if room < 0 and index:
                return found[:index]
        return found[: self.size]

    def next_token(self, last_key: str, *, is_last: bool) -> str:
        """Returns the token of the next page, given the key of the last entry of this one; empty for the last page."""
        return "" if is_last else base64.urlsafe_b64encode(last_key.encode()).decode()


def page_of(size: int, token: str, *, default_size: int) -> Page:
    """Reads `page_size` and `page_token`.

    Raises:
        InvalidArgumentError: `size` is negative, or this server issued no such `token`.
    """
    if size < 0:
        raise InvalidArgumentError(f"expected a page_size of at least 0, got {size}", field="page_size")
    try:
        after = base64.b64decode(_checked_length(token).encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidArgumentError(
            f"expected the next_page_token of an earlier page, got {quoted(token)}", field="page_token"
        ) from None
    return Page(after, min(size or default_size, _MAX_PAGE_SIZE))


def _checked_length(token: str) -> str:
    if len(token) > MAX_TOKEN_BYTES:
        raise ValueError("it is longer than any token")
    return token
