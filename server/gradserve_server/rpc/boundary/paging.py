"""Pages of lists."""

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_TOKEN_BYTES, quoted

_MAX_PAGE_SIZE = 1000
_MAX_PARTS = 1 << 12
"""The most components and the like on a page: entries that have many come on several pages."""

EntryT = TypeVar("EntryT")


@dataclass(frozen=True)
class Page:
    """The bounds of one page of a list.

    Attributes:
        after: The key of the last entry of the page before; empty for the first page.
        size: The most entries.
    """

    after: str
    size: int

    def filled(self, found: Sequence[EntryT], weight: Callable[[EntryT], int]) -> Sequence[EntryT]:
        """Returns the first of the entries found, as many as fit on the page; at least one, if there is any.

        Args:
            found: The entries from here on; more than fit.
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
        InvalidArgumentError: `size` is negative, or `token` is not from this server.
    """
    if size < 0:
        raise InvalidArgumentError(f"expected a page_size of at least 0, got {size}", field="page_size")
    try:
        after = base64.b64decode(_of_possible_length(token).encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidArgumentError(
            f"expected the next_page_token of an earlier page, got {quoted(token)}", field="page_token"
        ) from None
    return Page(after, min(size or default_size, _MAX_PAGE_SIZE))


def _of_possible_length(token: str) -> str:
    if len(token) > MAX_TOKEN_BYTES:
        raise ValueError("it is longer than any token")
    return token
