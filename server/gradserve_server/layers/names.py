"""Bounds of the names and ids that come with requests."""

from gradserve_server.errors import InvalidArgumentError

MAX_NAME_BYTES = 1024
"""In UTF-8; and so for ids."""
MAX_ID_BYTES = 128


def check_length(text: str, limit: int, field: str) -> None:
    """Checks that a name or id is not longer than `limit` bytes.

    Raises:
        InvalidArgumentError: It is.
    """
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise InvalidArgumentError(f"expected at most {limit} bytes, got {num_bytes}", field=field)
