"""Asks a server for its health, as load balancers do."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def check_health(address: str, timeout: float) -> str:
    """Returns "SERVING", "NOT_SERVING", or why there is no answer."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
