from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HoldClientLeaseRequest(_message.Message):
    __slots__ = ("client_id", "worker_client_id")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    worker_client_id: str
    def __init__(self, client_id: _Optional[str] = ..., worker_client_id: _Optional[str] = ...) -> None: ...

class HoldClientLeaseResponse(_message.Message):
    __slots__ = ("replaced",)
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    replaced: bool
    def __init__(self, replaced: bool = ...) -> None: ...

class EndClientLeaseRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class EndClientLeaseResponse(_message.Message):
    __slots__ = ("num_deleted",)
    NUM_DELETED_FIELD_NUMBER: _ClassVar[int]
    num_deleted: int
    def __init__(self, num_deleted: _Optional[int] = ...) -> None: ...
