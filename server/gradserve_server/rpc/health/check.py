"""Asks a server for its health, as load balancers do."""

import math
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gradserve.address import Address
from gradserve.transport.route import Route
from gradserve.transport.status import explain


def check_health(address: str, timeout: float) -> str:
    """Returns "SERVING", "NOT_SERVING", or why there was no answer within `timeout` seconds (math.inf for no limit).

    Raises:
        gradserve.InvalidArgumentError: It is not an address.
    """
    route = Route.to(Address.to_connect(address))
    with grpc.insecure_channel(route.address.target, options=route.options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=None if timeout == math.inf else timeout)
        except grpc.RpcError as raised:
            error: Any = raised
            return f"{error.code().name}: {explain(error.code(), error.details(), route)}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
