"""The same as gradserve_protocol.v1.batch_norm_layer_messages_pb2."""

from gradserve_protocol.v1.batch_norm_layer_messages_pb2 import *  # noqa: F403
