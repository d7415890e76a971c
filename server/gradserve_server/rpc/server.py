"""The gRPC server: services, health, reflection, ports."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from gradserve.address import Address
from gradserve.v1 import (
    accumulator_service_pb2,
    batch_norm_layer_service_pb2,
    gradient_ops_service_pb2,
    lease_service_pb2,
    server_service_pb2,
    tensor_service_pb2,
)
from gradserve_server.config import LimitsConfig
from gradserve_server.rpc.accumulators.service import AccumulatorServicer
from gradserve_server.rpc.batch_norm_layers.service import BatchNormLayerServicer
from gradserve_server.rpc.boundary.admission import Admission
from gradserve_server.rpc.boundary.faults import Faults
from gradserve_server.rpc.boundary.grpc_log import quiet_client_faults
from gradserve_server.rpc.boundary.handlers import make_handler
from gradserve_server.rpc.boundary.malformed import RefuseMalformed
from gradserve_server.rpc.gradient_ops.service import GradientOpsServicer
from gradserve_server.rpc.health.service import HealthServicer
from gradserve_server.rpc.leases.service import LeaseServicer
from gradserve_server.rpc.listeners.arrivals import Arrivals
from gradserve_server.rpc.listeners.endpoint import Endpoint, LastingEndpoint
from gradserve_server.rpc.server_info.service import ServerServicer
from gradserve_server.rpc.tensors.service import STREAM_CODECS, TensorServicer

SERVICES = (
    tensor_service_pb2.DESCRIPTOR.services_by_name["TensorService"],
    accumulator_service_pb2.DESCRIPTOR.services_by_name["AccumulatorService"],
    gradient_ops_service_pb2.DESCRIPTOR.services_by_name["GradientOpsService"],
    batch_norm_layer_service_pb2.DESCRIPTOR.services_by_name["BatchNormLayerService"],
    lease_service_pb2.DESCRIPTOR.services_by_name["LeaseService"],
    server_service_pb2.DESCRIPTOR.services_by_name["ServerService"],
)

_HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

_MIN_PING_INTERVAL_MS = 10_000
"""Clients may ping this often without a call under way; gRPC's own limit of 5 minutes outlasts most firewalls."""


KEEPALIVE_INTERVAL_MS = 30_000
"""After so long without traffic, a connection is asked for a sign of life. The calls of a client whose machine or
network is gone would else wait, and take a round, for nobody. gRPC's own interval is two hours."""

KEEPALIVE_TIMEOUT_MS = 15_000
"""How long the server then waits for that."""


class GrpcServer:
    """Speaks gRPC for the servicers. Made and used on one event loop."""

    def __init__(
        self,
        *,
        tensors: TensorServicer,
        accumulators: AccumulatorServicer,
        gradient_ops: GradientOpsServicer,
        batch_norm_layers: BatchNormLayerServicer,
        leases: LeaseServicer,
        server: ServerServicer,
        limits: LimitsConfig,
    ) -> None:
        self._admission = Admission()
        self._arrivals = Arrivals(self._admission)
        options = (
            ("grpc.max_receive_message_length", int(limits.max_message_bytes)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            # Beyond 1000 calls that arrived and did not begin yet, gRPC would cancel some at random.
            ("grpc.server.max_pending_requests", limits.max_waiters),
            ("grpc.server.max_pending_requests_hard_limit", limits.max_waiters),
        )
        servicers = (tensors, accumulators, gradient_ops, batch_norm_layers, leases, server)
        names = [descriptor.full_name for descriptor in SERVICES]
        self._health = HealthServicer(names)
        described = reflection.ReflectionServicer([*names, _HEALTH.full_name, _REFLECTION.full_name])
        chain = (Faults(), self._admission, RefuseMalformed())
        handlers = (
            *(
                make_handler(descriptor, servicer, chain, STREAM_CODECS if servicer is tensors else None)
                for descriptor, servicer in zip(SERVICES, servicers, strict=True)
            ),
            make_handler(_HEALTH, self._health, (Faults(), RefuseMalformed())),
            make_handler(_REFLECTION, described, chain),
        )
        self._endpoint = LastingEndpoint(partial(Endpoint, handlers, (self._arrivals,), options))

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; returns them with the ports that were picked for port 0.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        return self._endpoint.bind(addresses)

    async def start(self) -> None:
        """Starts serving."""
        quiet_client_faults()
        await self._endpoint.start()

    def refuse_new_calls(self) -> None:
        """Answers new calls with UNAVAILABLE, once ports are closed, and health checks with NOT_SERVING."""
        self._admission.close()
        self._health.drain()

    async def stop(self, grace: float) -> None:
        """Closes the ports, lets calls under way go on for `grace` seconds, then ends them with UNAVAILABLE."""
        end = time.monotonic() + grace
        await self._arrivals.settle(self._endpoint.probe)
        await self._endpoint.stop(max(end - time.monotonic(), 0), self._arrivals.refuse)
