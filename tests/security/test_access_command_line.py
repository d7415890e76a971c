"""`gradserve token`, and `gradserve serve` with a wrong access file."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gradserve_server.cli import cli
from gradserve_server.security.access_file import read_policy
from gradserve_server.security.credentials import Credentials, digest_of
from gradserve_server.security.roles import Role
from tests.servers.command_line import run_cli


@pytest.mark.parametrize("name", ["trainer", "trainer-1", "trainer@example.org", "1"])
def test_token_prints_what_the_access_file_takes(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(cli, ["token", name])
    assert result.exit_code == 0
    client, file = result.output.split("\n\n")
    token = client.splitlines()[-1]
    assert token not in file
    path = tmp_path / "access.toml"
    path.write_text(file)
    identity = read_policy(path).identify(Credentials(token_digest=digest_of(token)))
    assert (identity.name, identity.role_in("any")) == (name, Role.WORKER)


def test_tokens_differ() -> None:
    outputs = {CliRunner().invoke(cli, ["token"]).output for _ in range(3)}
    assert len(outputs) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the access file {path}: no such file or directory"),
        ("[identities.a]\nroles = 3", "the access file {path} is not valid: identities.a.roles: expected a table"),
    ],
)
def test_a_server_does_not_start_with_a_wrong_file(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "access.toml"
    if text is not None:
        path.write_text(text)
    result = run_cli("serve", "--access", str(path), "--listen", "127.0.0.1:0")
    assert result.returncode == 2
    assert result.stderr.startswith(f"Error: --access: {message.format(path=path)}")
