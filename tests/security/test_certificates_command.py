"""`gradserve certificates`: the names in the certificate of a server."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from gradserve_server.commands.cli import cli


@pytest.mark.parametrize("hosts", [(), ("10.0.0.1",), ("train.example", "localhost")])
def test_a_server_is_reached_from_its_own_machine_too(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    arguments = [each for host in hosts for each in ("--host", host)]
    done = CliRunner().invoke(cli, ["certificates", str(tmp_path), *arguments])
    assert done.exit_code == 0, done.output
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = [str(each.value) for each in names]
    assert sorted(found) == sorted({*hosts, "localhost", "127.0.0.1", "::1"})
    assert f"the server, {', '.join(found)}\n" in done.stdout
