from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
    CODEC_E3M0: _ClassVar[Codec]
    CODEC_TOPK: _ClassVar[Codec]
CODEC_UNSPECIFIED: Codec
CODEC_BF16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec
CODEC_E3M0: Codec
CODEC_TOPK: Codec

class PackedTensor(_message.Message):
    __slots__ = ("codec", "data")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    codec: Codec
    data: _tensor_pb2.Tensor
    def __init__(self, codec: _Optional[_Union[Codec, str]] = ..., data: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
