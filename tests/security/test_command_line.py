"""TLS on the command line: a server with certificates, and the commands that ask it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gradserve.testing import ServerProcess
from gradserve_protocol.address import Address
from gradserve_server.commands.cli import cli
from gradserve_server.config import ListenConfig
from gradserve_server.security.tls import explicit_bulk_address, unprotected
from tests.servers.certificates import Certificates
from tests.servers.command_line import run_cli
from tests.servers.polling import eventually


@pytest.fixture(scope="module")
def server(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> "object":
    files = certificates.folder
    flags = ("--tls-certificate", f"{files}/server.pem", "--tls-key", f"{files}/server.key", "--tls-client-ca")
    with ServerProcess(tmp_path_factory.mktemp("server"), *flags, f"{files}/ca.pem", "--warm-up", "false") as running:
        yield running


def test_health_and_info(certificates: Certificates, server: ServerProcess) -> None:
    files = certificates.folder
    flags = ("--tls-ca", f"{files}/ca.pem", "--tls-client-certificate", f"{files}/worker-1.pem")
    variables = {
        "GRADSERVE_TLS_CA": f"{files}/ca.pem",
        "GRADSERVE_TLS_CLIENT_CERTIFICATE": f"{files}/worker-1.pem",
        "GRADSERVE_TLS_CLIENT_KEY": f"{files}/worker-1.key",
    }
    health = run_cli("health", server.address, *flags, "--tls-client-key", f"{files}/worker-1.key")
    assert (health.returncode, health.stdout) == (0, f"{server.address}: SERVING\n")
    info = run_cli("info", server.address, env={**variables, "GRADSERVE_TRANSPORT": "bulk"})
    assert info.returncode == 0
    assert "calls from here take: bulk\n" in info.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "uses TLS: connect with tls=gradserve.TLS(ca=...)"),
        (("--tls",), "is not accepted"),
        (("--tls-ca", "{}/strange/ca.pem"), "is not accepted"),
        (("--tls-ca", "{}/ca.pem"), "asks for the certificate of a client"),
        (("--tls-ca", "/nowhere/ca.pem"), "/nowhere/ca.pem: No such file or directory"),
        (("--tls-client-key", "{}/worker-1.key"), "expected certificate as well"),
    ],
)
def test_health_says_what_is_wrong(
    certificates: Certificates, server: ServerProcess, flags: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(cli, ["health", server.address, *(each.format(certificates.folder) for each in flags)])
    assert result.exit_code != 0
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"certificate": "{}/server.pem"}, "--tls-key: expected tls_key as well"),
        ({"key": "{}/server.key"}, "--tls-key: expected tls_certificate as well"),
        ({"client-ca": "{}/ca.pem"}, "--tls-client-ca: expected tls_certificate and tls_key as well"),
        ({"certificate": "/no", "key": "{}/server.key"}, "--tls-certificate: /no: No such file or directory"),
        ({"certificate": "{}/server.pem", "key": "{}/ca.key"}, "--tls-key: {}/ca.key: not the key of"),
    ],
)
def test_a_server_says_which_file_is_wrong(certificates: Certificates, settings: dict[str, str], message: str) -> None:
    flags = [part for name, path in settings.items() for part in (f"--tls-{name}", path.format(certificates.folder))]
    result = run_cli("serve", "--listen", "127.0.0.1:0", *flags)
    assert result.returncode == 2
    assert message.format(certificates.folder) in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("listen", "bulk", "is_encrypted", "warns_of"),
    [
        ("127.0.0.1:1", "auto", False, ""),
        ("localhost:1", "off", False, ""),
        ("[::1]:1", "auto", False, ""),
        ("unix:/a", "auto", False, ""),
        ("0.0.0.0:1", "auto", True, ""),
        ("0.0.0.0:1", "auto", False, "0.0.0.0:1"),
        ("[::]:1", "auto", False, "[::]:1"),
        ("grads.example:1", "auto", False, "grads.example:1"),
        ("localhost:1", "10.0.0.1:2", False, "10.0.0.1:2"),
    ],
)
def test_a_warning_of_addresses_without_protection(listen: str, bulk: str, is_encrypted: bool, warns_of: str) -> None:
    config = ListenConfig(listen=(listen,), bulk_listen=bulk)
    addresses = [*map(Address.to_listen, config.listen), *explicit_bulk_address(config)]
    warning = unprotected(addresses, is_encrypted=is_encrypted)
    if warns_of:
        assert warning.startswith(f"other machines may reach {warns_of}, and there is no encryption")
    else:
        assert not warning


def test_the_warning_is_logged_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--warm-up", "false", listen=("0.0.0.0:0",)) as running:
        eventually(lambda: "there is no encryption (--tls-certificate, --tls-key)" in running.log)
    assert running.log.count("WARNING") == 1
