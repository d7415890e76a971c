"""Keys of users: whose they are, and what is none."""

import base64

import pytest

from gradserve_server.errors import UnauthenticatedError
from gradserve_server.security.access import LIFETIME_SECONDS, UserKeys


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("uid", [0, 1000, 2**32 - 2])
def test_a_key_names_its_user(uid: int) -> None:
    keys = UserKeys(Clock())
    key = keys.issue(uid)
    assert keys.user_of(key) == uid
    assert key.isascii()
    assert key.isprintable()
    assert " " not in key


def test_it_expires() -> None:
    clock = Clock()
    keys = UserKeys(clock)
    key = keys.issue(5)
    clock.now += LIFETIME_SECONDS - 1
    assert keys.user_of(key) == 5
    clock.now += 1
    with pytest.raises(UnauthenticatedError, match="has expired"):
        keys.user_of(key)


def test_it_ends_with_the_server() -> None:
    with pytest.raises(UnauthenticatedError, match="is of another run of the server"):
        UserKeys(Clock()).user_of(UserKeys(Clock()).issue(5))


def test_one_changed_byte_makes_it_invalid() -> None:
    keys = UserKeys(Clock())
    key = base64.urlsafe_b64decode(keys.issue(5))
    for position in range(len(key)):
        changed = bytearray(key)
        changed[position] ^= 1
        with pytest.raises(UnauthenticatedError):
            keys.user_of(base64.urlsafe_b64encode(changed).decode())


@pytest.mark.parametrize("key", ["", "x", "=", "AAAA", "é", "A" * 59, "A" * 60, "A" * 10_000, "\udcff"])
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(UnauthenticatedError):
        UserKeys(Clock()).user_of(key)
