"""The access file: what is read from it, what is refused and in which words, and its reload."""

import logging
import os
import pwd
import time
from pathlib import Path

import pytest

from gradserve_server.errors import UnauthenticatedError
from gradserve_server.security.access import Access
from gradserve_server.security.access_file import AccessFileError, read_policy
from gradserve_server.security.credentials import Credentials, digest_of, new_token
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.security.own_limits import ContainerLimits, OwnLimits
from gradserve_server.security.peer import PeerCertificate
from gradserve_server.security.roles import Role
from gradserve_server.security.user_keys import UserKeys
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
