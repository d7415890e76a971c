import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IssueTicketRequest(_message.Message):
    __slots__ = ("client_id", "direction", "num_bytes")
    class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DIRECTION_UNSPECIFIED: _ClassVar[IssueTicketRequest.Direction]
        DIRECTION_BOTH: _ClassVar[IssueTicketRequest.Direction]
        DIRECTION_TO_SERVER: _ClassVar[IssueTicketRequest.Direction]
        DIRECTION_TO_CLIENT: _ClassVar[IssueTicketRequest.Direction]
    DIRECTION_UNSPECIFIED: IssueTicketRequest.Direction
    DIRECTION_BOTH: IssueTicketRequest.Direction
    DIRECTION_TO_SERVER: IssueTicketRequest.Direction
    DIRECTION_TO_CLIENT: IssueTicketRequest.Direction
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    direction: IssueTicketRequest.Direction
    num_bytes: int
    def __init__(self, client_id: _Optional[str] = ..., direction: _Optional[_Union[IssueTicketRequest.Direction, str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class IssueTicketResponse(_message.Message):
    __slots__ = ("ticket", "lifetime", "addresses")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    lifetime: _duration_pb2.Duration
    addresses: SocketAddresses
    def __init__(self, ticket: _Optional[bytes] = ..., lifetime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., addresses: _Optional[_Union[SocketAddresses, _Mapping]] = ...) -> None: ...

class SocketAddresses(_message.Message):
    __slots__ = ("tcp", "unix_path", "machine")
    TCP_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    tcp: _containers.RepeatedCompositeFieldContainer[TcpSocket]
    unix_path: str
    machine: str
    def __init__(self, tcp: _Optional[_Iterable[_Union[TcpSocket, _Mapping]]] = ..., unix_path: _Optional[str] = ..., machine: _Optional[str] = ...) -> None: ...

class TcpSocket(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("ticket", "client_id", "strand_key", "strand")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STRAND_KEY_FIELD_NUMBER: _ClassVar[int]
    STRAND_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    client_id: str
    strand_key: bytes
    strand: int
    def __init__(self, ticket: _Optional[bytes] = ..., client_id: _Optional[str] = ..., strand_key: _Optional[bytes] = ..., strand: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("strand_key", "user_key", "gpu", "why_no_gpu", "takes_metadata")
    STRAND_KEY_FIELD_NUMBER: _ClassVar[int]
    USER_KEY_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    WHY_NO_GPU_FIELD_NUMBER: _ClassVar[int]
    TAKES_METADATA_FIELD_NUMBER: _ClassVar[int]
    strand_key: bytes
    user_key: str
    gpu: bytes
    why_no_gpu: str
    takes_metadata: bool
    def __init__(self, strand_key: _Optional[bytes] = ..., user_key: _Optional[str] = ..., gpu: _Optional[bytes] = ..., why_no_gpu: _Optional[str] = ..., takes_metadata: bool = ...) -> None: ...

class GpuRegion(_message.Message):
    __slots__ = ("handle", "buffer_id", "event")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    buffer_id: int
    event: bytes
    def __init__(self, handle: _Optional[bytes] = ..., buffer_id: _Optional[int] = ..., event: _Optional[bytes] = ...) -> None: ...
