"""The command that makes certificates, and what it makes."""

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from gradserve_protocol.tls import TLS, client_certificates
from gradserve_server.commands.cli import cli
from gradserve_server.security.authority import Authority


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["certificates", *map(str, arguments)])


def names_in(path: Path) -> list[str]:
    names = x509.load_pem_x509_certificate(path.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    return [str(each.value) for each in names.value]


def test_a_first_deployment(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certificates"
    result = run(folder, "--host", "grads.example", "--host", "10.0.0.1", "--client", "worker-1", "--client", "chief")
    assert result.exit_code == 0
    assert sorted(each.name for each in folder.iterdir()) == [
        "ca.key",
        "ca.pem",
        "chief.key",
        "chief.pem",
        "server.key",
        "server.pem",
        "worker-1.key",
        "worker-1.pem",
    ]
    assert names_in(folder / "server.pem") == ["grads.example", "10.0.0.1", "localhost", "127.0.0.1", "::1"]
    assert names_in(folder / "chief.pem") == ["chief"]
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in folder.glob("*.key"))
    assert client_certificates(TLS(folder / "ca.pem", folder / "chief.pem", folder / "chief.key")) is not None
    assert result.output.splitlines()[-1] == f"{folder}/ca.pem: the authority, which both sides need"


def test_later_certificates_have_the_same_authority(tmp_path: Path) -> None:
    run(tmp_path)
    authority, server = ((tmp_path / name).read_bytes() for name in ("ca.pem", "server.pem"))
    assert names_in(tmp_path / "server.pem") == ["localhost", "127.0.0.1", "::1"]
    assert run(tmp_path, "--no-server", "--client", "late").exit_code == 0
    assert (tmp_path / "server.pem").read_bytes() == server
    run(tmp_path)
    assert (tmp_path / "server.pem").read_bytes() != server
    assert (tmp_path / "ca.pem").read_bytes() == authority


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--client", "../evil"], "expected letters, digits, dots, - and _ as the name of a client"),
        (["--client", "server"], "not ca or server, got 'server'"),
        (["--host", "x" * 300], "expected the name or the IP address of a host"),
        (["--days", "0"], "0 is not in the range 1<=x<=3650"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(tmp_path, *arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in run(file).output
    assert "not a directory" in run(file / "below").output.lower()
    Authority.in_folder(tmp_path)
    (tmp_path / "ca.key").unlink()
    assert run(tmp_path).output == f"Error: {tmp_path}/ca.key: no such file or directory\n"
    (tmp_path / "ca.key").write_text("hello")
    assert run(tmp_path).output == f"Error: {tmp_path}: ca.pem and ca.key are not those of an authority\n"


def test_the_key_of_another_authority(tmp_path: Path) -> None:
    Authority.in_folder(tmp_path / "a")
    Authority.in_folder(tmp_path / "b")
    (tmp_path / "a" / "ca.key").replace(tmp_path / "b" / "ca.key")
    assert f"{tmp_path}/b: ca.key is not the key of ca.pem" in run(tmp_path / "b").output
