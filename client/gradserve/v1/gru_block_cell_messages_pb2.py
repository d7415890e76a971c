"""The same as gradserve_protocol.v1.gru_block_cell_messages_pb2."""

from gradserve_protocol.v1.gru_block_cell_messages_pb2 import *  # noqa: F403
