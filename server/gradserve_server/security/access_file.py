"""The access file and the policy in it: identities, their credentials, roles and limits."""

from __future__ import annotations

import hmac
import os
import pwd
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from gradserve_server.config.settings import read_toml
from gradserve_server.errors import UnauthenticatedError
from gradserve_server.runtime.files import reason_of
from gradserve_server.security.identity import (
    ALL_CONTAINERS,
    MAX_IDENTITY_BYTES,
    NO_CONTAINER_LIMITS,
    NO_LIMITS,
    ContainerLimits,
    Credentials,
    Identity,
    OwnLimits,
    Role,
)

_INDEXED_BYTES = 2
DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(DIGEST_PREFIX + "[0-9a-f]{64}")
_NAME = re.compile(f"[A-Za-z0-9._@-]{{1,{MAX_IDENTITY_BYTES}}}")
_KEYS = ("tokens", "users", "certificates", "roles", "limits")
_COUNT: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=0)])
_SIZE: TypeAdapter[int] = TypeAdapter(Annotated[ByteSize, Field(ge=0)])
_LIMITS: Mapping[str, tuple[str, TypeAdapter[Any]]] = {
    "max_bytes": ("a size such as 4GiB", _SIZE),
    "max_device_bytes": ("a size such as 4GiB", _SIZE),
    "max_handles": ("a whole number", _COUNT),
    "max_calls": ("a whole number", _COUNT),
    "max_waiters": ("a whole number", _COUNT),
    "max_connections": ("a whole number", _COUNT),
    "max_region_bytes": ("a size such as 4GiB", _SIZE),
    "calls_per_second": ("a number greater than 0", TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)])),
}
_CONTAINER_LIMITS: Mapping[str, tuple[str, TypeAdapter[Any]]] = {
    "max_bytes": ("a size such as 4GiB", _SIZE),
    "max_accumulators": ("a whole number", _COUNT),
    "max_layers": ("a whole number", _COUNT),
    "max_waiters": ("a whole number", _COUNT),
}
_ROLES = {str(role): role for role in Role}
_MAX_UID = (1 << 32) - 2


class AccessFileError(Exception):
    """The file cannot be used. The message names it, and the line or the key."""


@dataclass(frozen=True)
class Policy:
    """The identities that a server knows, and their limits.

    Attributes:
        by_token: The identities by the digests of their tokens.
        by_certificate: The identities by the names in their certificates.
        by_uid: The identities by the users of Unix sockets.
        limits: The limits of identities, by their names.
        containers: The limits of containers; "*" for all that have no entry of their own.
    """

    by_token: Mapping[bytes, Identity] = field(default_factory=dict, repr=False)
    by_certificate: Mapping[str, Identity] = field(default_factory=dict)
    by_uid: Mapping[int, Identity] = field(default_factory=dict)
    limits: Mapping[str, OwnLimits] = field(default_factory=dict)
    containers: Mapping[str, ContainerLimits] = field(default_factory=dict)

    def identify(self, credentials: Credentials) -> Identity:
        """Returns the identity of a caller.

        Raises:
            UnauthenticatedError: It shows nothing, or nothing that the policy knows.
        """
        if credentials.problem:
            raise UnauthenticatedError(credentials.problem)
        if credentials.token_digest:
            return self._of_token(credentials.token_digest)
        shown = credentials.certificate
        if shown is not None:
            for name in (shown.common_name, *shown.names):
                if name in self.by_certificate:
                    return self.by_certificate[name]
        if credentials.uid is not None:
            found = self.by_uid.get(credentials.uid)
            if found is None:
                raise UnauthenticatedError(
                    f"the server does not know the user {credentials.uid} of this connection",
                    code="GS_UNKNOWN_CREDENTIALS",
                )
            return found
        if shown is not None:
            raise UnauthenticatedError(
                "the server does not know this client certificate, and there is no token", code="GS_UNKNOWN_CREDENTIALS"
            )
        raise UnauthenticatedError(
            "this server needs credentials: connect with token=, or set the environment variable GRADSERVE_TOKEN",
            code="GS_NO_CREDENTIALS",
        )

    def limits_of(self, name: str) -> OwnLimits:
        """Returns the limits of the identity of this name; none for one that is unknown."""
        return self.limits.get(name, NO_LIMITS)

    def container_limits(self, container: str) -> ContainerLimits:
        """Returns the limits of a container."""
        return self.containers.get(container) or self.containers.get(ALL_CONTAINERS) or NO_CONTAINER_LIMITS

    def _of_token(self, digest: bytes) -> Identity:
        """Returns the identity of a token. How long that takes tells at most how the token's digest begins."""
        for known, identity in self._by_beginning.get(digest[:_INDEXED_BYTES], ()):
            if hmac.compare_digest(known, digest):
                return identity
        raise UnauthenticatedError("the server does not know this token", code="GS_UNKNOWN_CREDENTIALS")

    @cached_property
    def _by_beginning(self) -> Mapping[bytes, Sequence[tuple[bytes, Identity]]]:
        found: dict[bytes, list[tuple[bytes, Identity]]] = {}
        for digest, identity in self.by_token.items():
            found.setdefault(digest[:_INDEXED_BYTES], []).append((digest, identity))
        return found


def read_policy(path: Path) -> Policy:
    """Reads and checks a file.

    Raises:
        AccessFileError: It cannot be read, or something in it is not valid.
    """
    try:
        content = read_toml(path)
    except OSError as error:
        raise AccessFileError(f"cannot read the access file {path}: {reason_of(error)}") from None
    except ValueError as error:
        raise AccessFileError(f"cannot read the access file {path}: {error}") from None
    try:
        return _policy(content)
    except (AccessFileError, RecursionError) as error:  # RecursionError: a message about tables within tables
        raise AccessFileError(f"the access file {path} is not valid: {error}") from None


def check_identity(entry: str) -> None:
    """Checks the lines of one identity.

    Raises:
        AccessFileError: They are not valid.
    """
    _policy(tomllib.loads(entry))


def add_identity(path: Path, entry: str) -> None:
    """Adds the lines of an identity to a file, in one step; makes the file if it does not exist, for its user alone.

    Raises:
        AccessFileError: They, or what is there, are not valid, the identity is there already, or the file cannot be
            read or written. It is as before.
    """
    check_identity(entry)
    (name,) = tomllib.loads(entry)["identities"]
    try:
        before, mode = (path.read_text(), path.stat().st_mode & 0o777) if path.exists() else ("", 0o600)
        if before.strip():
            read_policy(path)
            if name in tomllib.loads(before)["identities"]:
                raise AccessFileError(
                    f"expected an identity that is not in {path} yet, got {name!r}: to replace its token, add a second "
                    "one to its `tokens`, and remove the first when nobody uses it any more"
                )
        text = f"{before.rstrip()}\n\n{entry}" if before.strip() else entry
        _policy(tomllib.loads(text))
        beside = path.resolve().with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.touch(mode)
            beside.write_text(text)
            beside.chmod(mode)
            beside.replace(path.resolve())
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise AccessFileError(f"cannot add to the access file {path}: {reason}") from None


def _policy(content: Mapping[str, Any]) -> Policy:
    _check_keys(content, ("identities", "containers"), "")
    identities = content.get("identities")
    if not isinstance(identities, dict) or not identities:
        raise AccessFileError("expected at least one table [identities.NAME]")
    by_token: dict[bytes, Identity] = {}
    by_certificate: dict[str, Identity] = {}
    by_uid: dict[int, Identity] = {}
    limits: dict[str, OwnLimits] = {}
    for name, entry in identities.items():
        where = f"identities.{name}"
        if not _NAME.fullmatch(name):
            raise AccessFileError(
                f"{where}: expected a name of 1 to {MAX_IDENTITY_BYTES} letters, digits and the characters . _ @ -"
            )
        if not isinstance(entry, dict):
            raise AccessFileError(f"{where}: expected a table")
        _check_keys(entry, _KEYS, f"{where}.")
        limits[name] = _limits(entry.get("limits", {}), f"{where}.limits")
        identity = Identity(name, _roles(entry.get("roles"), f"{where}.roles"))
        for key, value in _entries(entry, "tokens", where):
            _add(by_token, _digest(value, key), identity, key)
        for key, value in _entries(entry, "certificates", where):
            _add(by_certificate, _certificate(value, key), identity, key)
        for key, value in _entries(entry, "users", where):
            _add(by_uid, _uid(value, key), identity, key)
    return Policy(by_token, by_certificate, by_uid, limits, _containers(content.get("containers", {})))


def _containers(tables: object) -> Mapping[str, ContainerLimits]:
    if not isinstance(tables, dict):
        raise AccessFileError("containers: expected tables such as [containers.NAME]")
    return {
        name: ContainerLimits(**_given_limits(limits, f"containers.{name}", _CONTAINER_LIMITS))
        for name, limits in tables.items()
    }


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise AccessFileError(f"unknown key {where}{key}; expected {', '.join(known)}")


def _entries(entry: Mapping[str, Any], name: str, where: str) -> Iterator[tuple[str, Any]]:
    values = entry.get(name, [])
    if not isinstance(values, list):
        raise AccessFileError(f"{where}.{name}: expected a list")
    for index, value in enumerate(values):
        yield f"{where}.{name}[{index}]", value


def _add(known: dict[Any, Identity], what: object, identity: Identity, key: str) -> None:
    if what in known:
        raise AccessFileError(f"{key}: expected each entry once, this one belongs to {known[what].name!r} already")
    known[what] = identity


def _roles(roles: object, where: str) -> Mapping[str, Role]:
    if not isinstance(roles, dict):
        raise AccessFileError(f'{where}: expected a table such as {{ "*" = "worker" }}: the role in each container')
    found = {}
    for container, role in roles.items():
        if not isinstance(role, str) or role not in _ROLES:
            raise AccessFileError(f"{where}.{container}: expected {', '.join(_ROLES)}, got {role!r}")
        found[container] = _ROLES[role]
    return found


def _limits(limits: object, where: str) -> OwnLimits:
    return OwnLimits(**_given_limits(limits, where, _LIMITS))


def _given_limits(limits: object, where: str, known: Mapping[str, tuple[str, TypeAdapter[Any]]]) -> dict[str, Any]:
    example = next(name for name, (_, adapter) in known.items() if adapter is _COUNT)
    if not isinstance(limits, dict):
        raise AccessFileError(f"{where}: expected a table such as {{ {example} = 1000 }}")
    _check_keys(limits, tuple(known), f"{where}.")
    found: dict[str, Any] = {}
    for name, value in limits.items():
        expected, adapter = known[name]
        try:
            found[name] = adapter.validate_python(value)
        except ValidationError:
            raise AccessFileError(f"{where}.{name}: expected {expected}, got {value!r}") from None
    return found


def _digest(value: object, key: str) -> bytes:
    # The message does not show the value: it may be the token itself.
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise AccessFileError(
            f"{key}: expected {DIGEST_PREFIX} and 64 hexadecimal digits, as `gradserve token` prints it"
        )
    return bytes.fromhex(value.removeprefix(DIGEST_PREFIX))


def _certificate(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise AccessFileError(f"{key}: expected the name in a certificate, got {value!r}")
    return value


def _uid(value: object, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_UID:
        return value
    if not isinstance(value, str):
        raise AccessFileError(f"{key}: expected the name or the number of a user, got {value!r}")
    try:
        return pwd.getpwnam(value).pw_uid
    except (KeyError, ValueError):
        raise AccessFileError(f"{key}: this machine has no user {value!r}") from None
