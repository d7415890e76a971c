"""Files with certificates: what is wrong with them, and how they are read again."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

import gradserve
import gradserve.aio
from gradserve_protocol.tls import client_certificates
from tests.servers.certificates import Certificates

GARBAGE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
BAD_KEY = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"


def encrypted_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize(
    ("role", "contents", "message"),
    [
        ("ca", None, "No such file or directory"),
        ("ca", b"", "expected a certificate in PEM format, found none"),
        ("ca", GARBAGE, "damaged certificate"),
        ("certificate", None, "No such file or directory"),
        ("certificate", b"hello", "expected a certificate in PEM format, found none"),
        ("certificate", GARBAGE, "damaged certificate"),
        ("key", None, "No such file or directory"),
        ("key", b"hello", "expected a private key in PEM format, found none"),
        ("key", BAD_KEY, "damaged key"),
        ("key", encrypted_key(), "expected a private key without a password"),
    ],
)
@pytest.mark.parametrize("connect", [gradserve.connect, gradserve.aio.connect])
async def test_a_file_that_cannot_be_used_is_named(
    certificates: Certificates, tmp_path: Path, role: str, contents: bytes | None, message: str, connect: Any
) -> None:
    files = {"ca": certificates.ca, "certificate": certificates.folder / "worker-1.pem"}
    files["key"] = certificates.folder / "worker-1.key"
    files[role] = bad = tmp_path / "bad.pem"
    if contents is not None:
        bad.write_bytes(contents)
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        connect("localhost", tls=gradserve.TLS(**files))
    assert error.value.field == f"tls.{role}"
    assert str(error.value).startswith(f"{bad}: ")
    assert message in str(error.value)


@pytest.mark.parametrize("role", ["ca", "certificate", "key"])
def test_nobody_waits_for_what_is_no_file(certificates: Certificates, tmp_path: Path, role: str) -> None:
    """Neither at the beginning, nor when a file has become something else."""
    files = {}
    for each, name in (("ca", "ca.pem"), ("certificate", "worker-1.pem"), ("key", "worker-1.key")):
        files[each] = tmp_path / name
        shutil.copy(certificates.folder / name, files[each])
    current = client_certificates(gradserve.TLS(**files))
    assert current is not None
    before = current.current()
    files[role].unlink()
    os.mkfifo(files[role])
    current.look_again()
    assert current.current() is before
    with pytest.raises(gradserve.InvalidArgumentError, match="expected a regular file") as error:
        client_certificates(gradserve.TLS(**files))
    assert error.value.field == f"tls.{role}"


def test_a_key_that_belongs_to_another_certificate(certificates: Certificates) -> None:
    folder = certificates.folder
    tls = gradserve.TLS(certificates.ca, folder / "worker-1.pem", folder / "worker-2.key")
    with pytest.raises(gradserve.InvalidArgumentError, match=r"worker-2\.key: not the key of .*worker-1\.pem"):
        gradserve.connect("localhost", tls=tls)


@pytest.mark.parametrize(
    ("make", "field", "message"),
    [
        (lambda: gradserve.TLS(certificate="a"), "tls.key", "expected key as well"),
        (lambda: gradserve.TLS(key="a"), "tls.certificate", "expected certificate as well"),
        (lambda: gradserve.TLS(ca=3), "tls.ca", "expected the path of a file for ca, got int"),  # type: ignore[arg-type]
        (lambda: gradserve.connect("localhost", tls="ca.pem"), "tls", "expected gradserve.TLS"),  # type: ignore[arg-type]
    ],
)
def test_arguments(make: Callable[[], object], field: str, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=message) as error:
        make()
    assert error.value.field == field


def test_files_are_read_again_when_they_change_and_fit_together(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for source, target in (("ca.pem", "ca.pem"), ("worker-1.pem", "me.pem"), ("worker-1.key", "me.key")):
        shutil.copy(certificates.folder / source, tmp_path / target)
    files = client_certificates(gradserve.TLS(tmp_path / "ca.pem", tmp_path / "me.pem", tmp_path / "me.key"))
    assert files is not None
    first = files.current()
    files.look_again()
    assert files.current() is first  # nothing has changed

    def put(source: str, target: str) -> None:
        shutil.copy(certificates.folder / source, tmp_path / "new")
        os.replace(tmp_path / "new", tmp_path / target)
        files.look_again()

    with caplog.at_level(logging.INFO, "gradserve"):
        put("worker-2.pem", "me.pem")
        assert files.current() is first
        files.look_again()
        assert files.current() is first
        (tmp_path / "me.key").unlink()
        files.look_again()
        assert files.current() is first
        put("worker-2.key", "me.key")
        second = files.current()
    assert second.certificate == (certificates.folder / "worker-2.pem").read_bytes()
    assert [(each.levelname, "not the key of" in each.message) for each in caplog.records] == [
        ("WARNING", True),
        ("WARNING", False),
        ("INFO", False),
    ]


def test_a_change_is_found_within_a_second(certificates: Certificates, tmp_path: Path) -> None:
    from gradserve_protocol.tls import CertificateFiles, client_context

    shutil.copy(certificates.ca, tmp_path / "ca.pem")
    now = 0.0
    files = CertificateFiles(gradserve.TLS(tmp_path / "ca.pem"), client_context, lambda: now)
    first = files.current()
    shutil.copy(certificates.strange_ca, tmp_path / "ca.pem")
    now = 0.9
    assert files.current() is first
    now = 1.0
    assert files.current().ca == certificates.strange_ca.read_bytes()


def test_without_authorities_those_of_the_system_are_trusted() -> None:
    files = client_certificates(gradserve.TLS())
    assert files is not None
    assert files.current().context.check_hostname
    assert files.current().key is None
