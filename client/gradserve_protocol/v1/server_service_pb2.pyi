from gradserve_protocol.v1 import server_messages_pb2 as _server_messages_pb2
from gradserve_protocol.v1 import status_messages_pb2 as _status_messages_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
