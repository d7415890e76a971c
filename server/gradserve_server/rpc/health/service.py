"""The standard health service, which ends its streams when the server drains."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from grpc_health.v1 import health_pb2, health_pb2_grpc

from gradserve_server.errors import NotFoundError
from gradserve_server.limits import quoted
from gradserve_server.rpc.boundary.chain import Call

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Reports whether the services serve: all do until the server drains, and none do from then on.

    The servicer of grpcio-health-checking never ends a Watch, so any watching client, such as a load balancer, would
    delay the drain until its time limit.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset(("", *services))
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Answers NOT_SERVING from now on, also to watching clients, whose streams end."""
        self._draining.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, call: Call) -> _Response:
        if request.service not in self._names:
            raise NotFoundError(f"no service {quoted(request.service)}", field="service")
        return _response(serving=not self._draining.is_set())

    async def Watch(self, request: health_pb2.HealthCheckRequest, call: Call) -> AsyncIterator[_Response]:
        if request.service not in self._names:
            yield _Response(status=_Response.SERVICE_UNKNOWN)
            await self._draining.wait()
            return
        if not self._draining.is_set():
            yield _response(serving=True)
            await self._draining.wait()
        yield _response(serving=False)


def _response(*, serving: bool) -> _Response:
    return _Response(status=_Response.SERVING if serving else _Response.NOT_SERVING)
