"""The same as gradserve_protocol.v1.socket_service_pb2_grpc."""

from gradserve_protocol.v1.socket_service_pb2_grpc import *  # noqa: F403
