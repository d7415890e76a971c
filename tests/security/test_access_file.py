"""The access file: what is read from it, what is refused and in which words, and its reload."""

import errno
import itertools
import logging
import os
import pwd
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradserve_server.config.settings import MOST_BYTES
from gradserve_server.errors import UnauthenticatedError
from gradserve_server.security.access import Access, UserKeys
from gradserve_server.security.access_file import AccessFileError, read_policy
from gradserve_server.security.identity import (
    ANONYMOUS,
    ContainerLimits,
    Credentials,
    Identity,
    OwnLimits,
    PeerCertificate,
    Role,
    digest_of,
    new_token,
)
from tests.security.serving import entry, replace_file

KEYS = UserKeys(time.monotonic)
TOKEN = new_token()
DIGEST = f"sha256:{digest_of(TOKEN).hex()}"


def test_an_identity_has_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    me = pwd.getpwuid(os.getuid()).pw_name
    path.write_text(
        f"""
        [identities.trainer]
        tokens = ["{DIGEST}"]
        users = ["{me}", 4000000000]
        certificates = ["trainer.example"]
        roles = {{ "*" = "worker", mnist = "chief" }}
        [identities.trainer.limits]
        max_bytes = "4GiB"
        max_handles = 7
        max_calls = 3
        max_waiters = 2
        calls_per_second = 2.5
        max_connections = 5
        max_region_bytes = 99
        max_device_bytes = "2GiB"
        [containers.mnist]
        max_bytes = "1GiB"
        max_accumulators = 5
        max_layers = 6
        max_waiters = 7
        """
    )
    policy = read_policy(path)
    shown = (
        Credentials(token_digest=digest_of(TOKEN)),
        Credentials(certificate=PeerCertificate("trainer.example")),
        Credentials(certificate=PeerCertificate("", ("other", "trainer.example"))),
        Credentials(uid=os.getuid()),
        Credentials(uid=4000000000),
    )
    (trainer,) = {policy.identify(each).name: policy.identify(each) for each in shown}.values()
    assert policy.limits_of("trainer") == OwnLimits(4 << 30, 7, 3, 2, 2.5, 5, 99, 2 << 30)
    assert policy.limits_of("somebody else") == OwnLimits()
    assert policy.container_limits("mnist") == ContainerLimits(1 << 30, 5, 6, 7)
    assert policy.container_limits("other") == ContainerLimits()
    assert (trainer.role_in("mnist"), trainer.role_in("other"), trainer.highest_role) == (
        Role.CHIEF,
        Role.WORKER,
        Role.CHIEF,
    )


@pytest.mark.parametrize(
    ("credentials", "reason"),
    [
        (Credentials(), "needs credentials"),
        (Credentials(is_local=True), "needs credentials"),
        (Credentials(token_digest=digest_of("x")), "does not know this token"),
        (Credentials(token_digest=digest_of("x"), uid=5), "does not know this token"),
        (Credentials(certificate=PeerCertificate("y", ("z",))), "does not know this client certificate"),
        (Credentials(uid=6), "does not know the user 6"),
    ],
)
def test_strangers_are_refused(tmp_path: Path, credentials: Credentials, reason: str) -> None:
    path = tmp_path / "access.toml"
    path.write_text(entry("a", {}, TOKEN, users=(5,)))
    with pytest.raises(UnauthenticatedError, match=reason):
        read_policy(path).identify(credentials)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected at least one table \[identities.NAME\]"),
        ("identities = 3", "expected at least one table"),
        ("[identities.a]\nroles = {}\n[identities.a]\n", "line 3"),
        ("[identities.a\n", "line 1"),
        ("[identity.a]\nroles = {}\n", "unknown key identity; expected identities, containers"),
        ("[identities.a]\nrole = {}\n", r"unknown key identities.a.role; expected tokens, users, certificates, roles"),
        ("[identities.a]\n", r"identities.a.roles: expected a table"),
        ('[identities."a/b"]\nroles = {}\n', "identities.a/b: expected a name of 1 to 64"),
        ("[identities]\na = 1\n", "identities.a: expected a table"),
        ('[identities.a]\nroles = { x = "boss" }\n', "identities.a.roles.x: expected worker, chief, admin, got 'boss'"),
        ("[identities.a]\nroles = { x = 3 }\n", "identities.a.roles.x: expected worker, chief, admin, got 3"),
        ("containers = 3\n[identities.a]\nroles = {}\n", "containers: expected tables such as"),
        (
            "[identities.a]\nroles = {}\n[containers.x]\nmax_layers = -1\n",
            "containers.x.max_layers: expected a whole number, got -1",
        ),
        ("[identities.a]\nroles = {}\nlimits = 3\n", "identities.a.limits: expected a table such as"),
        (
            "[identities.a]\nroles = {}\nlimits = { max = 3 }\n",
            "unknown key identities.a.limits.max; expected",
        ),
        (
            '[identities.a]\nroles = {}\nlimits = { max_bytes = "x" }\n',
            "identities.a.limits.max_bytes: expected a size such as 4GiB, got 'x'",
        ),
        (
            "[identities.a]\nroles = {}\nlimits = { calls_per_second = 0 }\n",
            "limits.calls_per_second: expected a number greater than 0, got 0",
        ),
        ("[identities.a]\nroles = {}\nlimits = { max_calls = true }\n", "limits.max_calls: expected a whole number"),
        ('[identities.a]\nroles = {}\ntokens = "x"\n', "identities.a.tokens: expected a list"),
        (f'[identities.a]\nroles = {{}}\ntokens = ["{TOKEN}"]\n', r"identities.a.tokens\[0\]: expected sha256: and 64"),
        ("[identities.a]\nroles = {}\nusers = [true]\n", r"identities.a.users\[0\]: expected the name or the number"),
        ('[identities.a]\nroles = {}\nusers = ["no such"]\n', r"users\[0\]: this machine has no user 'no such'"),
        ('[identities.a]\nroles = {}\ncertificates = [""]\n', r"certificates\[0\]: expected the name in a certificate"),
        (
            entry("a", {}, TOKEN) + entry("b", {}, TOKEN),
            r"identities.b.tokens\[0\]: expected each entry once, this one belongs to 'a' already",
        ),
    ],
    ids=lambda text: str(len(text)),  # the same in each process, unlike the token
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "access.toml"
    path.write_text(text)
    with pytest.raises(AccessFileError, match=message) as raised:
        read_policy(path)
    assert str(path) in str(raised.value)
    assert TOKEN not in str(raised.value)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_named_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nothing(_path: Path) -> None:
    pass


def contents(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(text.encode("latin-1"))

    return write


UNUSABLE = [
    (nothing, "no such file or directory"),
    (a_folder, "expected a regular file"),
    (a_named_pipe, "expected a regular file"),
    (a_device, "expected a regular file"),
    (contents("#" * (MOST_BYTES + 1)), f"expected at most {MOST_BYTES} bytes"),
    (contents("\xff"), "invalid start byte"),
    (contents("a = " + "[" * 5000), "nested too deeply"),
    (contents("a = " + "1" * 5000), "digits"),
    (
        contents("[identities.a]\nroles = { x = " + "[" * 300 + "]" * 300 + " }"),
        "nested too deeply|recursion|worker",
    ),
    (contents("a." * 60 + "a = 1"), "unknown key a"),
    (contents("# " + "." * 100 + '\n"' + "." * 100 + '" = 1'), "unknown key [.]+;"),
    (contents("\n" + "a." * 20_000 + "a = 1"), r"expected a key of at most 64 parts \(at line 2\)"),
    (contents("\n[" + "'a' . " * 20_000 + "a]"), r"expected a key of at most 64 parts \(at line 2\)"),
]
"""What makes a path something that is no access file, and a part of the message."""


@pytest.mark.parametrize(("spoil", "message"), UNUSABLE, ids=lambda each: getattr(each, "__name__", None))
def test_what_cannot_be_used_is_refused_and_followed_on(
    tmp_path: Path, spoil: Callable[[Path], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "access.toml"
    path.write_text(entry("before", {}, TOKEN))
    access = Access(path, KEYS)
    path.unlink()
    spoil(path)
    access.look()
    assert re.search(message, caplog.text)
    assert "identities and tokens removed since still count" in caplog.text
    assert access.identify(Credentials(token_digest=digest_of(TOKEN))).name == "before"
    if path.is_dir():
        path.rmdir()
    replace_file(path, entry("other", {}, new_token()))
    access.look()
    with pytest.raises(UnauthenticatedError):
        access.identify(Credentials(token_digest=digest_of(TOKEN)))


def test_a_reminder_comes_every_ten_minutes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, seconds = tmp_path / "access.toml", itertools.count()
    path.write_text(entry("before", {}, TOKEN))
    access = Access(path, KEYS, lambda: next(seconds))
    path.write_text("broken")
    for _ in range(1300):
        access.look()
    assert [record.getMessage().count("the policy stays as it was") for record in caplog.records] == [1, 1, 1]


def test_a_file_that_could_not_be_read_for_a_moment_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a change of the file: the process had no descriptor left."""
    path = tmp_path / "access.toml"
    path.write_text(entry("before", {}, TOKEN))
    access = Access(path, KEYS)
    replace_file(path, entry("after", {}, TOKEN))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", raising(OSError(errno.EMFILE, "too many open files")))
        access.look()
    access.look()
    assert access.identify(Credentials(token_digest=digest_of(TOKEN))).name == "after"


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AccessFileError, match="no such file or directory"):
        Access(tmp_path / "nowhere.toml", KEYS)


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "access.toml"
    path.write_text(entry("before", {}, TOKEN))
    access = Access(path, KEYS)
    shown = Credentials(token_digest=digest_of(TOKEN))
    for text, name, logged in (
        (entry("before", {}, TOKEN), "before", "read the access file"),
        (entry("after", {}, TOKEN), "after", "read the access file"),
        ("[identities.after]\ntokens = 3", "after", "the policy stays as it was"),
        ("", "after", "the policy stays as it was"),
        (entry("later", {}, TOKEN), "later", "read the access file"),
    ):
        replace_file(path, text)
        caplog.clear()
        access.look()
        access.look()
        assert access.identify(shown).name == name
        (record,) = caplog.records
        assert logged in record.getMessage()
    path.unlink()
    access.look()
    assert access.identify(shown).name == "later"


def test_ids_of_identities_never_meet() -> None:
    a, b = Identity("a"), Identity("b")
    assert (a.own("x"), a.own("a/x"), a.own("b/x"), a.own(""), ANONYMOUS.own("x")) == ("a/x", "a/x", "a/b/x", "", "x")
    assert a.reaches_id(a.own("b/x"))
    assert not b.reaches_id(a.own("b/x"))
    assert not a.reaches_id("x")
    assert ANONYMOUS.reaches_id("x")
    assert ANONYMOUS.reaches("a")
