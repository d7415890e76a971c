import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from gradserve_protocol.v1 import socket_messages_pb2 as _socket_messages_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ("with_shares",)
    WITH_SHARES_FIELD_NUMBER: _ClassVar[int]
    with_shares: bool
    def __init__(self, with_shares: bool = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "devices", "limits", "usage", "uptime", "device", "ops_prepared", "sockets", "incarnation", "identities", "containers", "why_no_gpu", "device_usage", "http_url", "member", "upstream", "time", "state_disk")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    OPS_PREPARED_FIELD_NUMBER: _ClassVar[int]
    SOCKETS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    WHY_NO_GPU_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USAGE_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    STATE_DISK_FIELD_NUMBER: _ClassVar[int]
    version: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    limits: ServerLimits
    usage: ServerUsage
    uptime: _duration_pb2.Duration
    device: str
    ops_prepared: bool
    sockets: _socket_messages_pb2.SocketAddresses
    incarnation: str
    identities: _containers.RepeatedCompositeFieldContainer[ShareUsage]
    containers: _containers.RepeatedCompositeFieldContainer[ShareUsage]
    why_no_gpu: str
    device_usage: DeviceUsage
    http_url: str
    member: ClusterMember
    upstream: str
    time: _timestamp_pb2.Timestamp
    state_disk: DiskUsage
    def __init__(self, version: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., limits: _Optional[_Union[ServerLimits, _Mapping]] = ..., usage: _Optional[_Union[ServerUsage, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., device: _Optional[str] = ..., ops_prepared: bool = ..., sockets: _Optional[_Union[_socket_messages_pb2.SocketAddresses, _Mapping]] = ..., incarnation: _Optional[str] = ..., identities: _Optional[_Iterable[_Union[ShareUsage, _Mapping]]] = ..., containers: _Optional[_Iterable[_Union[ShareUsage, _Mapping]]] = ..., why_no_gpu: _Optional[str] = ..., device_usage: _Optional[_Union[DeviceUsage, _Mapping]] = ..., http_url: _Optional[str] = ..., member: _Optional[_Union[ClusterMember, _Mapping]] = ..., upstream: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., state_disk: _Optional[_Union[DiskUsage, _Mapping]] = ...) -> None: ...

class DiskUsage(_message.Message):
    __slots__ = ("free_bytes", "total_bytes")
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    free_bytes: int
    total_bytes: int
    def __init__(self, free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class ClusterMember(_message.Message):
    __slots__ = ("cluster", "index", "size")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    index: int
    size: int
    def __init__(self, cluster: _Optional[str] = ..., index: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("name", "description", "total_memory_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    total_memory_bytes: int
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., total_memory_bytes: _Optional[int] = ...) -> None: ...

class DeviceUsage(_message.Message):
    __slots__ = ("max_bytes", "computing_bytes", "stored_bytes", "accumulator_bytes", "layer_bytes", "cached_bytes", "other_bytes", "num_evicted", "evicted_bytes", "num_compiled", "num_launches", "bytes_to_device", "bytes_to_host", "wait")
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILED_FIELD_NUMBER: _ClassVar[int]
    NUM_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    BYTES_TO_DEVICE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TO_HOST_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    max_bytes: int
    computing_bytes: int
    stored_bytes: int
    accumulator_bytes: int
    layer_bytes: int
    cached_bytes: int
    other_bytes: int
    num_evicted: int
    evicted_bytes: int
    num_compiled: int
    num_launches: int
    bytes_to_device: int
    bytes_to_host: int
    wait: _duration_pb2.Duration
    def __init__(self, max_bytes: _Optional[int] = ..., computing_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., accumulator_bytes: _Optional[int] = ..., layer_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., num_evicted: _Optional[int] = ..., evicted_bytes: _Optional[int] = ..., num_compiled: _Optional[int] = ..., num_launches: _Optional[int] = ..., bytes_to_device: _Optional[int] = ..., bytes_to_host: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ServerLimits(_message.Message):
    __slots__ = ("max_message_bytes", "inline_limit_bytes", "max_bytes", "max_handles", "max_accumulators", "max_waiters", "id_window", "default_lease", "max_lease", "max_layers", "undelivered_lease", "client_lease", "max_bookkeeping_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INLINE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_HANDLES_FIELD_NUMBER: _ClassVar[int]
    MAX_ACCUMULATORS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITERS_FIELD_NUMBER: _ClassVar[int]
    ID_WINDOW_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_LAYERS_FIELD_NUMBER: _ClassVar[int]
    UNDELIVERED_LEASE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_LEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_BOOKKEEPING_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    inline_limit_bytes: int
    max_bytes: int
    max_handles: int
    max_accumulators: int
    max_waiters: int
    id_window: int
    default_lease: _duration_pb2.Duration
    max_lease: _duration_pb2.Duration
    max_layers: int
    undelivered_lease: _duration_pb2.Duration
    client_lease: _duration_pb2.Duration
    max_bookkeeping_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., inline_limit_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_handles: _Optional[int] = ..., max_accumulators: _Optional[int] = ..., max_waiters: _Optional[int] = ..., id_window: _Optional[int] = ..., default_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_layers: _Optional[int] = ..., undelivered_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., client_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_bookkeeping_bytes: _Optional[int] = ...) -> None: ...

class ServerUsage(_message.Message):
    __slots__ = ("num_bytes", "num_handles", "num_accumulators", "num_waiters", "num_layers", "bookkeeping_bytes", "num_parameters")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCUMULATORS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BOOKKEEPING_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_handles: int
    num_accumulators: int
    num_waiters: int
    num_layers: int
    bookkeeping_bytes: int
    num_parameters: int
    def __init__(self, num_bytes: _Optional[int] = ..., num_handles: _Optional[int] = ..., num_accumulators: _Optional[int] = ..., num_waiters: _Optional[int] = ..., num_layers: _Optional[int] = ..., bookkeeping_bytes: _Optional[int] = ..., num_parameters: _Optional[int] = ...) -> None: ...

class ShareUsage(_message.Message):
    __slots__ = ("name", "num_bytes", "num_handles", "num_accumulators", "num_waiters", "num_layers", "bookkeeping_bytes", "device_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCUMULATORS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BOOKKEEPING_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    num_handles: int
    num_accumulators: int
    num_waiters: int
    num_layers: int
    bookkeeping_bytes: int
    device_bytes: int
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_handles: _Optional[int] = ..., num_accumulators: _Optional[int] = ..., num_waiters: _Optional[int] = ..., num_layers: _Optional[int] = ..., bookkeeping_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ...) -> None: ...
