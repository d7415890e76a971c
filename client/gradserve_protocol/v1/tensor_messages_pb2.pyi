import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutTensorsRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutTensorsHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[PutTensorsHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutTensorsHeader(_message.Message):
    __slots__ = ("tensors", "lease", "device", "receipt", "for_next_call")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    FOR_NEXT_CALL_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorSpec]
    lease: _duration_pb2.Duration
    device: str
    receipt: bytes
    for_next_call: bool
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorSpec, _Mapping]]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., device: _Optional[str] = ..., receipt: _Optional[bytes] = ..., for_next_call: bool = ...) -> None: ...

class PutTensorsResponse(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ...) -> None: ...

class GetTensorsRequest(_message.Message):
    __slots__ = ("handles", "release")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[str]
    release: bool
    def __init__(self, handles: _Optional[_Iterable[str]] = ..., release: bool = ...) -> None: ...

class GetTensorsResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GetTensorsHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[GetTensorsHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class GetTensorsHeader(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorSpec]
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorSpec, _Mapping]]] = ...) -> None: ...

class StoreTensorsRequest(_message.Message):
    __slots__ = ("tensors", "lease", "device", "receipt")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    lease: _duration_pb2.Duration
    device: str
    receipt: bytes
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., device: _Optional[str] = ..., receipt: _Optional[bytes] = ...) -> None: ...

class StoreTensorsResponse(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ...) -> None: ...

class ReadTensorsRequest(_message.Message):
    __slots__ = ("handles", "release", "into")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[str]
    release: bool
    into: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    def __init__(self, handles: _Optional[_Iterable[str]] = ..., release: bool = ..., into: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ...) -> None: ...

class ReadTensorsResponse(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ...) -> None: ...

class DeleteTensorsRequest(_message.Message):
    __slots__ = ("handles", "receipts")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[str]
    receipts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, handles: _Optional[_Iterable[str]] = ..., receipts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DeleteTensorsResponse(_message.Message):
    __slots__ = ("num_deleted",)
    NUM_DELETED_FIELD_NUMBER: _ClassVar[int]
    num_deleted: int
    def __init__(self, num_deleted: _Optional[int] = ...) -> None: ...

class ListTensorsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTensorsResponse(_message.Message):
    __slots__ = ("tensors", "next_page_token")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[StoredTensor]
    next_page_token: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[StoredTensor, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class StoredTensor(_message.Message):
    __slots__ = ("handle", "spec", "num_bytes", "lease_remaining")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_FIELD_NUMBER: _ClassVar[int]
    handle: str
    spec: _tensor_pb2.TensorSpec
    num_bytes: int
    lease_remaining: _duration_pb2.Duration
    def __init__(self, handle: _Optional[str] = ..., spec: _Optional[_Union[_tensor_pb2.TensorSpec, _Mapping]] = ..., num_bytes: _Optional[int] = ..., lease_remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
