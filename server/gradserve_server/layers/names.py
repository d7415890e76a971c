"""Limits for the names and ids in requests."""

from gradserve_server.errors import InvalidArgumentError

MAX_NAME_BYTES = 1024
"""The limit of names in UTF-8; MAX_ID_BYTES is the limit of ids."""
MAX_ID_BYTES = 128


def check_length(text: str, limit: int, field: str) -> None:
    """Checks that a name or id is not longer than `limit` bytes.

    Raises:
        InvalidArgumentError: It is longer.
    """
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise InvalidArgumentError(f"expected at most {limit} bytes, got {num_bytes}", field=field)
