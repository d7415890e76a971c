"""Health checks of a server, as load balancers make them, and a shortcut for `gradserve health`.

The shortcut takes a tenth of the processor time, if the answer is the usual one. Health checks run every few seconds,
beside training, and importing the command takes longer than the check itself. So this module imports nothing but gRPC
for the shortcut, which leaves everything but a plain SERVING to the command.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc

    from gradserve.transport.route import Route
    from gradserve_protocol.tls import TLS, CertificateFiles

_ADDRESS = re.compile(r"unix:[^,?#%\s]+|[A-Za-z0-9_][\w.-]*:[0-9]{1,5}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_LOOPBACK = re.compile(r"unix:.*|localhost:.*|127\.[0-9.]+:.*")
_ELSEWHERE = re.compile(r"GRADSERVE_TLS.*")
"""Environment variables that change what the command does."""
_SERVING = b"\x08\x01"
"""grpc.health.v1.HealthCheckResponse with the status SERVING."""
_DEFAULT_ADDRESS, _DEFAULT_SECONDS = "localhost:50051", "5.0"


def check_health(address: str, timeout: float, tls: "TLS | None" = None) -> str:
    """Returns "SERVING", "NOT_SERVING", or the reason why no answer came within `timeout` seconds (math.inf: no limit).

    Raises:
        gradserve.InvalidArgumentError: `address` is not an address, or a file of `tls` cannot be used.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from gradserve.transport.route import Route
    from gradserve.transport.status import explain
    from gradserve_protocol.address import Address
    from gradserve_protocol.tls import client_certificates

    route = Route.to(Address.to_connect(address))
    certificates = None if route.address.path else client_certificates(tls)
    with _open_channel(route, certificates) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=None if timeout == math.inf else timeout)
        except grpc.RpcError as raised:
            error: Any = raised
            message, _ = explain(error.code(), error.details(), route, is_encrypted=certificates is not None)
            return f"{error.code().name}: {message}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def _open_channel(route: "Route", certificates: "CertificateFiles | None") -> "grpc.Channel":
    import grpc

    from gradserve.transport.channel import channel_credentials

    if certificates is None:
        return grpc.insecure_channel(route.address.target, options=route.options)
    credentials = channel_credentials(certificates.current())
    return grpc.secure_channel(route.address.target, credentials, options=route.options)


def line_if_serving(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the line that `gradserve health` prints for a server that serves.

    Args:
        arguments: The arguments of `gradserve health`: an address, as a word or as --address, and --timeout.
        environment: The environment variables.

    Returns:
        None if the command itself must answer: for other options, TLS, several servers, and any other answer.
    """
    given = _understood(arguments, environment)
    if given is None:
        return None
    address, seconds = given
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as `process.silence_grpc` does
    import grpc

    path = address.removeprefix("unix:") if address.startswith("unix:") else ""
    options = (("grpc.enable_http_proxy", 0),) if _LOOPBACK.fullmatch(address) else ()
    target = f"unix:{path}" if path else f"dns:///{address}"
    with grpc.insecure_channel(target, options=options) as channel:
        try:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer = check(b"", timeout=seconds)
        except grpc.RpcError:
            return None
    return f"{address}: SERVING" if answer == _SERVING else None


def _understood(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, float] | None:
    """Returns the address and the timeout, or None if the arguments say anything else."""
    options = {"--address": "", "--timeout": _DEFAULT_SECONDS}
    words: list[str] = []
    rest = iter(arguments)
    for each in rest:
        name, equals, value = each.partition("=")
        name = "--address" if name == "-a" and not equals else name
        if name in options:
            options[name] = value if equals else next(rest, "")
        else:
            words.append(each)
    if len(words) > 1 or (words and options["--address"]) or any(map(_ELSEWHERE.fullmatch, environment)):
        return None
    address = (*words, options["--address"], environment.get("GRADSERVE_ADDRESS"), _DEFAULT_ADDRESS)
    chosen = next(filter(None, address))
    if not _ADDRESS.fullmatch(chosen) or not _SECONDS.fullmatch(options["--timeout"]):
        return None
    return chosen, float(options["--timeout"])
