from gradserve_protocol.v1 import parameters_messages_pb2 as _parameters_messages_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
