"""The same as gradserve_protocol.v1.codecs_pb2."""

from gradserve_protocol.v1.codecs_pb2 import *  # noqa: F403
