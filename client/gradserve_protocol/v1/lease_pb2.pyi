import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lifetime(_message.Message):
    __slots__ = ("owner_client_id", "idle_lease")
    OWNER_CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    IDLE_LEASE_FIELD_NUMBER: _ClassVar[int]
    owner_client_id: str
    idle_lease: _duration_pb2.Duration
    def __init__(self, owner_client_id: _Optional[str] = ..., idle_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
