"""Certificates that are replaced while calls go on."""

import shutil
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_protocol.variables import RESTART_PATIENCE_VARIABLE
from gradserve_server.security.authority import Authority
from gradserve_testing import LocalServer
from tests.observe.http_client import connect, get, url_of
from tests.servers.certificates import HOSTS, Certificates, make_certificates
from tests.servers.connecting import transport_of
from tests.servers.polling import PATIENCE_SECONDS, eventually

GRADIENT = np.ones(300_000, np.float32)


@pytest.fixture
def own(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@pytest.fixture
def server(own: Certificates) -> Iterator[LocalServer]:
    with LocalServer(own.config(asks_clients=True)) as local:
        yield local


def replace_authority(own: Certificates) -> None:
    """Replaces all files, one after the other, in the order in which people do: nothing fits together meanwhile.

    They are made before: on a busy machine, that takes longer than a client tries again.
    """
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.in_folder(Path(folder))
        authority.issue_client("worker-1", 30)
        authority.issue_client("worker-2", 30)
        authority.issue_server(HOSTS, 30)
        for name in ("ca", "worker-1", "worker-2", "server"):
            for kind in ("key", "pem"):
                shutil.move(Path(folder) / f"{name}.{kind}", own.folder / f"{name}.{kind}")
        assert not list(Path(folder).iterdir())


def look_now(server: LocalServer, tls_of: gradserve.Client | None = None) -> None:
    """Nobody waits for the next look at the files."""
    server.inspect(lambda running: running._certificates.look_again() if running._certificates else None)
    if tls_of is not None:
        certificates = transport_of(tls_of)._settings.certificates
        certificates.look_again()


@pytest.mark.parametrize("way", ["grpc", "bulk"])
def test_calls_go_on_while_all_certificates_are_replaced(
    own: Certificates, server: LocalServer, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTART_PATIENCE_VARIABLE, str(PATIENCE_SECONDS))  # a busy disk takes long to replace them
    failures: list[BaseException] = []
    stop = threading.Event()
    rounds = 0

    def work(client: gradserve.Client) -> None:
        nonlocal rounds
        try:
            while not stop.is_set():
                handle = client.put(GRADIENT)
                np.testing.assert_array_equal(client.get(handle, release=True), GRADIENT)
                rounds += 1
        except BaseException as error:
            failures.append(error)

    def several_rounds() -> None:
        before = rounds
        eventually(lambda: rounds > before + 3 or bool(failures))

    tls = own.client("worker-1")
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport=way, tls=tls) as client:
        thread = threading.Thread(target=work, args=(client,))
        thread.start()
        try:
            for _ in range(2):
                several_rounds()
                replace_authority(own)
                look_now(server, client)
                several_rounds()
                with gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport=way, tls=tls) as another:
                    assert another.server_info().transport.way == way
        finally:
            stop.set()
            thread.join()
    assert not failures


@pytest.mark.parametrize("way", ["grpc", "bulk"])
def test_an_old_client_finds_the_new_certificates_when_its_own_do_not_work_any_more(
    own: Certificates, server: LocalServer, way: Any
) -> None:
    tls = own.client("worker-1")
    address = server.address
    with gradserve.connect(address, timeout=PATIENCE_SECONDS, transport=way, tls=tls) as client:
        client.server_info()  # its certificates are those from before
        old = transport_of(client)._settings.certificates.current()
        replace_authority(own)
        look_now(server, client)
        client.server_info()
        assert transport_of(client)._settings.certificates.current() is not old


class Mending(gradserve.Interceptor):
    """Makes a client trust the server's authority once it has been refused."""

    def __init__(self, trusted: Path, ca: Path) -> None:
        self.trusted, self.ca = trusted, ca

    def around_attempt(self, call: gradserve.CallInfo) -> gradserve.Around:
        try:
            yield None
        except gradserve.UnavailableError:
            assert call.attempt <= 5, "trusting has not helped"
            shutil.copy(self.ca, self.trusted)
            raise


@pytest.mark.parametrize("way", ["grpc", "bulk"])
def test_a_call_that_could_not_be_sent_is_tried_again_even_if_it_deletes_what_it_reads(
    own: Certificates, server: LocalServer, tmp_path: Path, way: Any
) -> None:
    trusted = tmp_path / "trusted.pem"
    shutil.copy(own.strange_ca, trusted)
    tls = gradserve.TLS(trusted, own.folder / "worker-1.pem", own.folder / "worker-1.key")
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS, tls=own.client("worker-1")) as owner:
        handle = owner.put(GRADIENT)
        with gradserve.connect(
            server.address,
            timeout=PATIENCE_SECONDS,
            transport=way,
            tls=tls,
            interceptors=[Mending(trusted, own.ca)],
        ) as reader:
            np.testing.assert_array_equal(reader.get(handle, release=True), GRADIENT)
        with pytest.raises(gradserve.NotFoundError):
            owner.get(handle)


def test_who_is_not_trusted_any_more_is_refused(own: Certificates, server: LocalServer, tmp_path: Path) -> None:
    for name in ("ca.pem", "worker-1.pem", "worker-1.key"):
        shutil.copy(own.folder / name, tmp_path / f"old-{name}")
    replace_authority(own)
    look_now(server)
    old = gradserve.TLS(own.ca, tmp_path / "old-worker-1.pem", tmp_path / "old-worker-1.key")
    with (
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS, tls=old) as client,
        pytest.raises(gradserve.UnavailableError, match="gets none that it accepts"),
    ):
        client.server_info()


def http_context(own: Certificates, name: str = "worker-1") -> ssl.SSLContext:
    """What a program that reads the HTTP port trusts and shows, as the files are now."""
    context = ssl.create_default_context(cafile=str(own.ca))
    context.load_cert_chain(own.folder / f"{name}.pem", own.folder / f"{name}.key")
    return context


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_http_port_follows_too(own: Certificates, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loop == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    with LocalServer(own.config(asks_clients=True)) as server:
        url = url_of(server)
        before = http_context(own)
        assert get(url, "/healthz", tls=before).status == 200
        with closing(connect(url, before)) as open_before:
            open_before.connect()
            replace_authority(own)
            look_now(server)
            assert get(url, "/healthz", tls=http_context(own)).status == 200
            with pytest.raises(ssl.SSLCertVerificationError, match="CERTIFICATE_VERIFY_FAILED"):
                get(url, "/healthz", tls=before)
            before.load_verify_locations(own.ca)
            with pytest.raises(OSError, match="unknown ca|reset by peer|closed|Broken pipe|EOF"):
                get(url, "/healthz", tls=before)
            open_before.request("GET", "/healthz")
            assert open_before.getresponse().status == 200
