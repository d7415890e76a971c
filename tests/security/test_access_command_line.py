"""`gradserve token`, and `gradserve serve` with a wrong access file."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gradserve_server.commands.cli import cli
from gradserve_server.security.access_file import read_policy
from gradserve_server.security.identity import Credentials, Role, digest_of
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


@pytest.mark.parametrize(
    ("options", "container", "role"),
    [
        ([], "any", Role.WORKER),
        (["--role", "chief"], "any", Role.CHIEF),
        (["--role", "admin", "--container", "my container"], "my container", Role.ADMIN),
    ],
)
def test_token_adds_to_the_access_file(tmp_path: Path, options: list[str], container: str, role: Role) -> None:
    path = tmp_path / "access.toml"
    for name in ("first", "second"):
        result = CliRunner().invoke(cli, ["token", name, "--access", str(path), *options])
        assert result.exit_code == 0, result.output
        (token,) = result.output.splitlines()
        assert path.stat().st_mode & 0o777 == 0o600
        identity = read_policy(path).identify(Credentials(token_digest=digest_of(token)))
        assert (identity.name, identity.role_in(container)) == (name, role)
        assert (identity.role_in("another") is None) == ("--container" in options)
    assert [each.name for each in tmp_path.iterdir()] == ["access.toml"]


def test_an_access_file_stays_what_it_is_beside(tmp_path: Path) -> None:
    path, link = tmp_path / "access.toml", tmp_path / "link"
    path.write_text('# ours\n[identities.a]\nusers = [1]\nroles = { "*" = "worker" }')
    path.chmod(0o640)
    link.symlink_to(path)
    assert CliRunner().invoke(cli, ["token", "b", "--access", str(link)]).exit_code == 0
    assert path.read_text().startswith("# ours\n[identities.a]\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (
            ["a"],
            '[identities.a]\nusers = [1]\nroles = { "*" = "worker" }',
            "expected an identity that is not in {path} yet",
        ),
        (
            ["b"],
            "[identities.a]\nroles = 3",
            "the access file {path} is not valid: identities.a.roles: expected a table",
        ),
        (["b", "--role", "boss"], "", "identities.b.roles.*: expected worker, chief, admin, got 'boss'"),
        (["b!"], "", "identities.b!: expected a name of"),
    ],
    ids=["there already", "not valid before", "role", "name"],
)
def test_what_token_refuses(tmp_path: Path, arguments: list[str], text: str, message: str) -> None:
    path = tmp_path / "access.toml"
    path.write_text(text)
    result = CliRunner().invoke(cli, ["token", *arguments, "--access", str(path)])
    assert result.exit_code == 1
    assert message.format(path=path) in result.output
    assert path.read_text() == text


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
