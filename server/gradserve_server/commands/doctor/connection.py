"""Checks of the way to a server: settings, address, connection, certificates, health."""

import datetime
import os
import shlex
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gradserve_server.commands.doctor.subject import Observation, Subject, Verdict, ok, problem, warning
from gradserve_server.commands.wording import duration
from gradserve_server.config.settings import SettingsError

if TYPE_CHECKING:
    from cryptography import x509

_LONGEST_ATTEMPT = 5.0
"""Seconds to connect to one address, if the timeout allows as much."""


_OPTIONS = {
    "tls.ca": "--tls-ca or GRADSERVE_TLS_CA",
    "tls.certificate": "--tls-client-certificate or GRADSERVE_TLS_CLIENT_CERTIFICATE",
    "tls.key": "--tls-client-key or GRADSERVE_TLS_CLIENT_KEY",
}
"""Options and variables by the fields of errors."""


def check_settings(subject: Subject) -> Iterator[Observation]:
    """Reads the address, the files of TLS and the variables of clients."""
    import gradserve

    try:
        settings = subject.settings
    except SettingsError as error:
        yield problem(error.message, "--tls-client-certificate FILE and --tls-client-key FILE together, or neither")
        return
    except gradserve.InvalidArgumentError as error:
        field = error.field or ""
        option = _OPTIONS.get(field, "ADDRESS or GRADSERVE_ADDRESS: HOST:PORT or unix:PATH")
        yield problem(error.message, f"unset or correct {field}" if field in os.environ else f"correct {option}")
        return
    token = "a token" if settings.token is not None else "no token"
    encrypted = "TLS" if settings.certificates is not None else "no TLS"
    yield ok(f"{subject.route.address}, {encrypted}, {token}, transport {settings.transport}")


def check_address(subject: Subject) -> Iterator[Observation]:
    """Looks up the address, and the proxy to it."""
    address, proxy = subject.route.address, subject.route.proxy
    if address.path:
        yield from _unix_socket(address.path)
        return
    if proxy is not None:
        variable = next((each for each in ("no_grpc_proxy", "no_proxy") if each in os.environ), "no_grpc_proxy")
        hosts = ",".join(filter(None, (os.environ.get(variable), address.host)))
        yield warning(
            f"connections go through the proxy of {proxy}, without the bulk socket",
            f"export {variable}={shlex.quote(hosts)}",
        )
    try:
        found = _resolved(address.host, address.port)
    except OSError as error:
        text = f"{address.host} cannot be looked up: {error.strerror or error}"
        if proxy is None:
            yield problem(
                text,
                f"getent hosts {shlex.quote(address.host)} shows what this machine knows; correct "
                "ADDRESS, GRADSERVE_ADDRESS, DNS or /etc/hosts",
            )
        else:
            yield ok(f"{text}; the proxy looks it up")
        return
    yield ok(f"{address.host} is {', '.join(place[0] for _, place in found)}")


def _unix_socket(path: str) -> Iterator[Observation]:
    if not os.path.exists(path):
        yield problem(
            f"there is no socket {path}",
            f"gradserve serve --listen unix:{shlex.quote(path)}; between containers, a volume with its folder",
        )
    elif not os.access(path, os.W_OK):
        yield problem(f"this user may not open {path}", f"run as the user of the server, or chmod o+rw {path}")
    else:
        yield ok(f"{path} can be opened")


def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, place) for family, _, _, _, place in found]


def check_connection(subject: Subject) -> Iterator[Observation]:
    """Connects to each address of the server."""
    address, proxy = subject.route.address, subject.route.proxy
    if address.path:
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.connect(address.path)
        except OSError as error:
            yield problem(f"{address}: {error.strerror}", f"gradserve serve --listen {address}, on this machine")
            return
        yield ok(f"connected to {address}")
        return
    if proxy is not None:
        yield Verdict.SKIPPED, f"the proxy of {proxy} makes connections; the check of health shows whether it can", ""
        return
    failures: list[OSError] = []
    reached = []
    for family, place in _resolved(address.host, address.port):
        with socket.socket(family, socket.SOCK_STREAM) as made:
            made.settimeout(min(subject.timeout, _LONGEST_ATTEMPT))
            began = time.perf_counter()
            try:
                made.connect(place)
            except OSError as error:
                failures.append(error)
            else:
                reached.append(f"{place[0]} in {duration(time.perf_counter() - began)}")
    if reached:
        yield ok(f"port {address.port} reached: {', '.join(reached)}")
    elif any(isinstance(each, ConnectionRefusedError) for each in failures):
        yield problem(
            f"nobody listens at {address}",
            f"gradserve serve --listen {_listening(address)} on that machine, or correct ADDRESS or GRADSERVE_ADDRESS",
        )
    else:
        why = "no answer in time" if isinstance(failures[0], TimeoutError) else failures[0].strerror or failures[0]
        yield problem(
            f"{address}: {why}",
            f"let TCP port {address.port} through firewalls and network policies on "
            f"the way; nc -vz {address.host} {address.port} tries it",
        )


def _listening(address: Any) -> str:
    from gradserve.transport.route import is_loopback

    return str(address) if is_loopback(address.host) else f"0.0.0.0:{address.port}"


_NO_TLS = "leave out --tls..., unset GRADSERVE_TLS, GRADSERVE_TLS_CA; in Python, connect without tls="
_WITH_CA = "--tls-ca ca.pem or GRADSERVE_TLS_CA=ca.pem, in Python tls=gradserve.TLS(ca='ca.pem')"
_WITH_CERTIFICATE = (
    "--tls-client-certificate FILE --tls-client-key FILE, in Python tls=gradserve.TLS(ca=..., certificate=..., "
    "key=...); gradserve certificates FOLDER --no-server --client NAME makes them"
)
_ENCRYPTING = (
    "gradserve certificates FOLDER --host HOST, gradserve serve --tls-certificate FOLDER/server.pem "
    "--tls-key FOLDER/server.key"
)
_ALERT = "ALERT"
"""A word in OpenSSL's reason if a server that uses TLS has ended a handshake."""
_EXPIRES_SOON = datetime.timedelta(days=14)
_WRONG_NAME = (62, 64)
"""OpenSSL's codes for a certificate of another host, and of another IP address."""


def check_tls(subject: Subject) -> Iterator[Observation]:
    """Compares the certificates that both sides expect."""
    if subject.route.address.path:
        yield ok("not needed: a Unix socket is not encrypted")
    elif subject.route.proxy is not None:
        yield Verdict.SKIPPED, "the proxy is between; the check of health shows whether certificates fit", ""
    elif subject.tls is None:
        yield from _without_tls(subject)
    else:
        yield from _with_tls(subject)


def _without_tls(subject: Subject) -> Iterator[Observation]:
    try:
        found, _ = _shake_hands(subject, _trusting())
    except OSError as error:
        is_refused = isinstance(error, ssl.SSLError) and _ALERT in (error.reason or "")
        names = "that asks for the certificate of a client" if is_refused else ""
    else:
        names = f"with a certificate for {_names(found)}"
    if names:
        yield problem(f"the server uses TLS, {names}", _WITH_CA)
    elif subject.settings.token is not None and not subject.is_of_this_machine:
        yield warning("the token travels to another machine without encryption", f"{_ENCRYPTING}, and here {_WITH_CA}")
    else:
        yield ok("connections are not encrypted, and the server expects that")


def _with_tls(subject: Subject) -> Iterator[Observation]:
    from gradserve_protocol.tls import client_certificates

    files = client_certificates(subject.tls)
    assert files is not None, "there are settings of TLS"
    try:
        found, is_accepted = _shake_hands(subject, files.current().context)
    except ssl.SSLCertVerificationError as error:
        found, _ = _shake_hands(subject, _trusting())
        yield problem(*_why_refused(subject, error, found))
        return
    except TimeoutError:
        yield problem("no answer to the handshake in time", "--timeout SECONDS; look at the server's log")
        return
    except OSError as error:
        is_accepted = not (isinstance(error, ssl.SSLError) and _ALERT in (error.reason or ""))
        if is_accepted:
            yield problem("the server does not use TLS", _NO_TLS)
            return
    if not is_accepted:
        is_shown = subject.tls is not None and subject.tls.certificate is not None
        outcome = "refuses the one that is shown" if is_shown else "none is shown"
        yield problem(f"the server asks for the certificate of a client, and {outcome}", _WITH_CERTIFICATE)
        return
    expires = found.not_valid_after_utc
    text = f"the certificate for {_names(found)} is valid until {expires:%Y-%m-%d}"
    is_soon = expires - datetime.datetime.now(datetime.UTC) < _EXPIRES_SOON
    yield warning(text, _new_certificate(subject)) if is_soon else ok(text)


def _shake_hands(subject: Subject, context: ssl.SSLContext) -> "tuple[x509.Certificate, bool]":
    """Returns the server's certificate, and whether the server accepts the client, as it decides after the handshake.

    Raises:
        OSError: The handshake has failed.
    """
    from cryptography import x509

    address = subject.route.address
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((address.host, address.port), min(subject.timeout, _LONGEST_ATTEMPT)) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as secured,
    ):
        contents = secured.getpeercert(binary_form=True)
        assert contents is not None, "servers have one"
        try:
            is_accepted = bool(secured.recv(1))  # an HTTP/2 server speaks first
        except OSError:
            is_accepted = False
    return x509.load_der_x509_certificate(contents), is_accepted


def _trusting() -> ssl.SSLContext:
    """Returns a context for which every certificate will do: to look at it, not to send anything."""
    from gradserve_protocol.tls import client_context

    context = client_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _names(certificate: "x509.Certificate") -> str:
    from cryptography import x509

    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no host"
    names = [*extension.get_values_for_type(x509.DNSName), *extension.get_values_for_type(x509.IPAddress)]
    return ", ".join(map(str, names))


def _why_refused(
    subject: Subject, error: ssl.SSLCertVerificationError, certificate: "x509.Certificate"
) -> tuple[str, str]:
    """Returns why this client does not accept a certificate, and the cure."""
    now = datetime.datetime.now(datetime.UTC)
    begins, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if expires < now:
        return f"the server's certificate has expired on {expires:%Y-%m-%d}", _new_certificate(subject)
    if begins > now:
        found = f"the server's certificate is valid from {begins:%Y-%m-%d %H:%M} UTC on, and here it is {now:%H:%M}"
        return found, "set the clock of this machine: timedatectl set-ntp true"
    if error.verify_code in _WRONG_NAME:
        found = f"the server's certificate is for {_names(certificate)}, not for {subject.route.address.host}"
        return found, f"one of these names as ADDRESS, or {_new_certificate(subject)}"
    trusted = (subject.tls and subject.tls.ca) or "the system's authorities"
    found = f"the server's certificate is signed by {certificate.issuer.rfc4514_string()}, which is not among {trusted}"
    return f"{found} ({error.verify_message})", f"the ca.pem of the server's authority: {_WITH_CA}"


def _new_certificate(subject: Subject) -> str:
    return (
        f"gradserve certificates FOLDER --host {shlex.quote(subject.route.address.host)} where the server's authority "
        "is; a server notices new files"
    )


def check_health(subject: Subject) -> Iterator[Observation]:
    """Asks whether the server serves."""
    from gradserve_server.rpc.health import check

    began = time.perf_counter()
    status, _, reason = check.check_health(subject.address, subject.timeout, subject.tls).partition(": ")
    took = time.perf_counter() - began
    if status == "SERVING":
        yield ok(f"SERVING, after {duration(took)}")
    elif status == "NOT_SERVING":
        yield problem(
            "NOT_SERVING: the server is starting or draining", f"{subject.on_server('health')} until it serves"
        )
    elif status == "DEADLINE_EXCEEDED":
        yield problem(f"no answer within {subject.timeout:g} s", "--timeout SECONDS; look at the server's log")
    elif status == "UNIMPLEMENTED":
        yield problem("another program listens there, or a load balancer", "correct ADDRESS or GRADSERVE_ADDRESS")
    else:
        by_proxy = f"see the cure of the check address; {_NO_TLS if subject.tls else _WITH_CA}"
        cure = by_proxy if subject.route.proxy is not None else "look at the server's log; correct ADDRESS"
        yield problem(": ".join(filter(None, (status, reason))), cure)
