"""The same as gradserve_protocol.v1.gradient_ops_service_pb2_grpc."""

from gradserve_protocol.v1.gradient_ops_service_pb2_grpc import *  # noqa: F403
