"""Health checks of a server, as load balancers make them."""

import math
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gradserve.transport.channel import channel_credentials
from gradserve.transport.route import Route
from gradserve.transport.status import explain
from gradserve_protocol.address import Address
from gradserve_protocol.tls import TLS, CertificateFiles, client_certificates


def check_health(address: str, timeout: float, tls: TLS | None = None) -> str:
    """Returns "SERVING", "NOT_SERVING", or the reason why no answer came within `timeout` seconds (math.inf: no limit).

    Raises:
        gradserve.InvalidArgumentError: `address` is not an address, or a file of `tls` cannot be used.
    """
    route = Route.to(Address.to_connect(address))
    certificates = None if route.address.path else client_certificates(tls)
    with _open_channel(route, certificates) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=None if timeout == math.inf else timeout)
        except grpc.RpcError as raised:
            error: Any = raised
            message = explain(error.code(), error.details(), route, is_encrypted=certificates is not None)
            return f"{error.code().name}: {message}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def _open_channel(route: Route, certificates: CertificateFiles | None) -> grpc.Channel:
    if certificates is None:
        return grpc.insecure_channel(route.address.target, options=route.options)
    credentials = channel_credentials(certificates.current())
    return grpc.secure_channel(route.address.target, credentials, options=route.options)
