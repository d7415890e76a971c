"""Bad requests fail, and change nothing."""

from tests.bad_input.conftest import (
    last_state,
    raw,
    unchanged,
)
from tests.bad_input.test_tables import (
    test_a_bad_request_fails_and_changes_nothing,
)

__all__ = [
    "last_state",
    "raw",
    "test_a_bad_request_fails_and_changes_nothing",
    "unchanged",
]
