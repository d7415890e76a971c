"""A server with access control, and the identities that it knows."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradserve_server.config import ListenConfig, RuntimeConfig, SecurityConfig, ServerConfig
from gradserve_server.security.identity import digest_of, new_token
from gradserve_testing import LocalServer

ROLES: Mapping[str, Mapping[str, str]] = {
    "idle": {},
    "worker": {"team": "worker"},
    "colleague": {"team": "worker"},
    "chief": {"team": "chief"},
    "visitor": {"elsewhere": "admin"},
    "admin": {"*": "admin"},
}
"""The roles of each identity."""

TOKENS: Mapping[str, str] = {name: new_token() for name in ROLES}


def entry(name: str, roles: Mapping[str, str], *tokens: str, users: tuple[object, ...] = ()) -> str:
    """Returns the lines of an identity."""
    digests = ", ".join(f'"sha256:{digest_of(token).hex()}"' for token in tokens)
    lines = [f"[identities.{name}]", f"tokens = [{digests}]", f"users = {list(users)}"]
    return "\n".join(
        [*lines, f"[identities.{name}.roles]", *(f'"{key}" = "{role}"' for key, role in roles.items()), ""]
    )


def all_entries() -> str:
    """Returns the lines of all identities."""
    return "".join(entry(name, roles, TOKENS[name]) for name, roles in ROLES.items())


def replace_file(path: Path, text: str) -> None:
    """Replaces a file, as careful people and programs do."""
    beside = path.with_name("beside")
    beside.write_text(text)
    os.replace(beside, path)


@contextmanager
def serving(path: Path, text: str, **listen: Any) -> Iterator[LocalServer]:
    """Runs a server whose access file has this text."""
    path.write_text(text)
    config = ServerConfig(
        listen=ListenConfig(**listen),
        runtime=RuntimeConfig(device="cpu", warm_up=False),
        security=SecurityConfig(access=str(path)),
    )
    with LocalServer(config) as local:
        yield local
