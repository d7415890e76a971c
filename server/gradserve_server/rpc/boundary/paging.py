"""Pages of lists."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_TOKEN_BYTES, quoted

_MAX_PAGE_SIZE = 1000


@dataclass(frozen=True)
class Page:
    """The bounds of one page of a list.

    Attributes:
        after: The key of the last entry of the page before; empty for the first page.
        size: The most entries.
    """

    after: str
    size: int

    def next_token(self, keys: Sequence[str]) -> str:
        """Returns the token of the next page, given the keys of this page and of one more entry, if there is one."""
        if len(keys) <= self.size:
            return ""
        return base64.urlsafe_b64encode(keys[self.size - 1].encode()).decode()


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
