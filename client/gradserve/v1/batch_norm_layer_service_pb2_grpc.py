"""The same as gradserve_protocol.v1.batch_norm_layer_service_pb2_grpc."""

from gradserve_protocol.v1.batch_norm_layer_service_pb2_grpc import *  # noqa: F403
