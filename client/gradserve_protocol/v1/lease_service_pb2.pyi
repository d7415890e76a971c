from gradserve_protocol.v1 import lease_messages_pb2 as _lease_messages_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
