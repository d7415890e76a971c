from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as _batch_norm_layer_messages_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
