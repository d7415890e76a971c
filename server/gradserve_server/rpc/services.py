"""All services of a server, including health and reflection, with the chain around their calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from gradserve_protocol.v1 import (
    accumulator_service_pb2,
    batch_norm_layer_service_pb2,
    gradient_ops_service_pb2,
    lease_service_pb2,
    parameters_service_pb2,
    server_service_pb2,
    socket_service_pb2,
    tensor_service_pb2,
)
from gradserve_server.observe.logs import FailureLog
from gradserve_server.observe.observed import Observed
from gradserve_server.rpc.accumulators import replies as accumulator_replies
from gradserve_server.rpc.boundary.chain import Codec, Interceptor, Service
from gradserve_server.rpc.boundary.interceptors import (
    AccessChecks,
    Admission,
    Faults,
    ObservedCalls,
    ReadableRequests,
    TracedCalls,
)
from gradserve_server.rpc.health.service import HealthServicer
from gradserve_server.rpc.parameters import replies as parameter_replies
from gradserve_server.rpc.tensors.service import STREAM_CODECS

SERVICES = (
    tensor_service_pb2.DESCRIPTOR.services_by_name["TensorService"],
    accumulator_service_pb2.DESCRIPTOR.services_by_name["AccumulatorService"],
    parameters_service_pb2.DESCRIPTOR.services_by_name["ParameterService"],
    gradient_ops_service_pb2.DESCRIPTOR.services_by_name["GradientOpsService"],
    batch_norm_layer_service_pb2.DESCRIPTOR.services_by_name["BatchNormLayerService"],
    lease_service_pb2.DESCRIPTOR.services_by_name["LeaseService"],
    socket_service_pb2.DESCRIPTOR.services_by_name["SocketService"],
    server_service_pb2.DESCRIPTOR.services_by_name["ServerService"],
)

_HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


def _reflection_v1() -> Any:
    """Returns the descriptor of grpc.reflection.v1, whose messages are those of v1alpha under another name."""
    alpha, current = "grpc.reflection.v1alpha", "grpc.reflection.v1"
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = text_format.MessageToString(file).replace(alpha, current)
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    file.name = "grpc/reflection/v1/reflection.proto"
    descriptor_pool.Default().Add(file)
    return descriptor_pool.Default().FindServiceByName(f"{current}.ServerReflection")


def _as_v1alpha(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a parser of v1 requests that returns requests for the servicer of v1alpha."""
    return lambda data: reflection_pb2.ServerReflectionRequest.FromString(parse(data).SerializeToString())


_REFLECTION_V1 = _reflection_v1()


class Services:
    """The services that listeners serve. Made and used on one event loop."""

    def __init__(
        self,
        servicers: Mapping[str, object],
        access: AccessChecks | None,
        interceptors: Sequence[Interceptor],
        on_fault: Callable[[], object],
        observed: Observed,
        keeps_gradients: bool,
    ) -> None:
        """Puts the chain around the servicers.

        Args:
            servicers: The servicer of each service, by the names of `SERVICES`.
            access: Says who may do what; None: everybody may do everything.
            interceptors: The interceptors that come after those of every server.
            on_fault: Called after each call that failed unexpectedly.
            observed: Counts and traces calls.
            keeps_gradients: Whether gradients and updates are read after their calls, as by an aggregator.
        """
        names = [descriptor.full_name for descriptor in SERVICES]
        self._health = HealthServicer(names)
        self.admission = Admission()
        standard = [each.full_name for each in (_HEALTH, _REFLECTION, _REFLECTION_V1)]
        described = reflection.ReflectionServicer([*names, *standard])
        checks: tuple[Interceptor, ...] = () if access is None else (access,)
        self.observed = ObservedCalls(observed.calls, FailureLog())
        """Counts and times the calls."""
        always: tuple[Interceptor, ...] = (self.observed, Faults(on_fault), *checks, ReadableRequests())
        spans: tuple[Interceptor, ...] = () if observed.tracer is None else (TracedCalls(observed.tracer),)
        chain: tuple[Interceptor, ...] = (
            self.observed,
            *spans,
            Faults(on_fault),
            self.admission,
            *checks,
            ReadableRequests(),
            *interceptors,
        )
        codecs = {
            "TensorService": STREAM_CODECS,
            "AccumulatorService": accumulator_replies.reply_codecs(),
            "ParameterService": parameter_replies.reply_codecs(),
        }
        self.all = (
            *(
                Service(descriptor, servicers[descriptor.name], chain, codecs.get(descriptor.name, {}), keeps_gradients)
                for descriptor in SERVICES
            ),
            # Health checks are answered until the end.
            Service(_HEALTH, self._health, always),
            Service(_REFLECTION, described, chain),
            Service(_REFLECTION_V1, described, chain, {"ServerReflectionInfo": Codec(_as_v1alpha)}),
        )
        """The services, each with its chain."""

    def close(self) -> None:
        """Answers new calls with UNAVAILABLE, and health checks with NOT_SERVING, from now on."""
        self.admission.close()
        self._health.drain()
