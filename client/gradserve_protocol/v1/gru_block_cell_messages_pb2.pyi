from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GRUBlockCellRequest(_message.Message):
    __slots__ = ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c", "placement")
    X_FIELD_NUMBER: _ClassVar[int]
    H_PREV_FIELD_NUMBER: _ClassVar[int]
    W_RU_FIELD_NUMBER: _ClassVar[int]
    W_C_FIELD_NUMBER: _ClassVar[int]
    B_RU_FIELD_NUMBER: _ClassVar[int]
    B_C_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    x: _tensor_pb2.Tensor
    h_prev: _tensor_pb2.Tensor
    w_ru: _tensor_pb2.Tensor
    w_c: _tensor_pb2.Tensor
    b_ru: _tensor_pb2.Tensor
    b_c: _tensor_pb2.Tensor
    placement: _tensor_pb2.Placement
    def __init__(self, x: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., h_prev: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., w_ru: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., w_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., b_ru: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., b_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class GRUBlockCellResponse(_message.Message):
    __slots__ = ("r", "u", "c", "h")
    R_FIELD_NUMBER: _ClassVar[int]
    U_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    H_FIELD_NUMBER: _ClassVar[int]
    r: _tensor_pb2.Tensor
    u: _tensor_pb2.Tensor
    c: _tensor_pb2.Tensor
    h: _tensor_pb2.Tensor
    def __init__(self, r: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., u: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., h: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class GRUBlockCellGradRequest(_message.Message):
    __slots__ = ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c", "r", "u", "c", "d_h", "weight_gradients", "placement")
    X_FIELD_NUMBER: _ClassVar[int]
    H_PREV_FIELD_NUMBER: _ClassVar[int]
    W_RU_FIELD_NUMBER: _ClassVar[int]
    W_C_FIELD_NUMBER: _ClassVar[int]
    B_RU_FIELD_NUMBER: _ClassVar[int]
    B_C_FIELD_NUMBER: _ClassVar[int]
    R_FIELD_NUMBER: _ClassVar[int]
    U_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    D_H_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    x: _tensor_pb2.Tensor
    h_prev: _tensor_pb2.Tensor
    w_ru: _tensor_pb2.Tensor
    w_c: _tensor_pb2.Tensor
    b_ru: _tensor_pb2.Tensor
    b_c: _tensor_pb2.Tensor
    r: _tensor_pb2.Tensor
    u: _tensor_pb2.Tensor
    c: _tensor_pb2.Tensor
    d_h: _tensor_pb2.Tensor
    weight_gradients: bool
    placement: _tensor_pb2.Placement
    def __init__(self, x: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., h_prev: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., w_ru: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., w_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., b_ru: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., b_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., r: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., u: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_h: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., weight_gradients: bool = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class GRUBlockCellGradResponse(_message.Message):
    __slots__ = ("d_x", "d_h_prev", "d_c_bar", "d_r_bar_u_bar", "d_w_ru", "d_w_c", "d_b_ru", "d_b_c")
    D_X_FIELD_NUMBER: _ClassVar[int]
    D_H_PREV_FIELD_NUMBER: _ClassVar[int]
    D_C_BAR_FIELD_NUMBER: _ClassVar[int]
    D_R_BAR_U_BAR_FIELD_NUMBER: _ClassVar[int]
    D_W_RU_FIELD_NUMBER: _ClassVar[int]
    D_W_C_FIELD_NUMBER: _ClassVar[int]
    D_B_RU_FIELD_NUMBER: _ClassVar[int]
    D_B_C_FIELD_NUMBER: _ClassVar[int]
    d_x: _tensor_pb2.Tensor
    d_h_prev: _tensor_pb2.Tensor
    d_c_bar: _tensor_pb2.Tensor
    d_r_bar_u_bar: _tensor_pb2.Tensor
    d_w_ru: _tensor_pb2.Tensor
    d_w_c: _tensor_pb2.Tensor
    d_b_ru: _tensor_pb2.Tensor
    d_b_c: _tensor_pb2.Tensor
    def __init__(self, d_x: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_h_prev: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_c_bar: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_r_bar_u_bar: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_w_ru: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_w_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_b_ru: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., d_b_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
