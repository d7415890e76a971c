from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerNormRequest(_message.Message):
    __slots__ = ("x", "scale", "offset", "epsilon", "placement")
    X_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    x: _tensor_pb2.Tensor
    scale: _tensor_pb2.Tensor
    offset: _tensor_pb2.Tensor
    epsilon: float
    placement: _tensor_pb2.Placement
    def __init__(self, x: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scale: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., offset: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., epsilon: _Optional[float] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class LayerNormResponse(_message.Message):
    __slots__ = ("y", "mean", "rstd")
    Y_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    RSTD_FIELD_NUMBER: _ClassVar[int]
    y: _tensor_pb2.Tensor
    mean: _tensor_pb2.Tensor
    rstd: _tensor_pb2.Tensor
    def __init__(self, y: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., mean: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rstd: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class LayerNormGradRequest(_message.Message):
    __slots__ = ("y_backprop", "x", "scale", "mean", "rstd", "placement")
    Y_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    RSTD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    y_backprop: _tensor_pb2.Tensor
    x: _tensor_pb2.Tensor
    scale: _tensor_pb2.Tensor
    mean: _tensor_pb2.Tensor
    rstd: _tensor_pb2.Tensor
    placement: _tensor_pb2.Placement
    def __init__(self, y_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., x: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scale: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., mean: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rstd: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class LayerNormGradResponse(_message.Message):
    __slots__ = ("x_backprop", "scale_backprop", "offset_backprop")
    X_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    SCALE_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    x_backprop: _tensor_pb2.Tensor
    scale_backprop: _tensor_pb2.Tensor
    offset_backprop: _tensor_pb2.Tensor
    def __init__(self, x_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scale_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., offset_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
