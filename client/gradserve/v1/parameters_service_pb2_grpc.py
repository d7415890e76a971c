"""The same as gradserve_protocol.v1.parameters_service_pb2_grpc."""

from gradserve_protocol.v1.parameters_service_pb2_grpc import *  # noqa: F403
