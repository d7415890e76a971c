from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FusedBatchNormRequest(_message.Message):
    __slots__ = ("x", "scale", "offset", "mean", "variance", "epsilon", "exponential_avg_factor", "data_format", "is_training", "placement")
    X_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    VARIANCE_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    EXPONENTIAL_AVG_FACTOR_FIELD_NUMBER: _ClassVar[int]
    DATA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    x: _tensor_pb2.Tensor
    scale: _tensor_pb2.Tensor
    offset: _tensor_pb2.Tensor
    mean: _tensor_pb2.Tensor
    variance: _tensor_pb2.Tensor
    epsilon: float
    exponential_avg_factor: float
    data_format: str
    is_training: bool
    placement: _tensor_pb2.Placement
    def __init__(self, x: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scale: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., offset: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., mean: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., variance: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., epsilon: _Optional[float] = ..., exponential_avg_factor: _Optional[float] = ..., data_format: _Optional[str] = ..., is_training: bool = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class FusedBatchNormResponse(_message.Message):
    __slots__ = ("y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3")
    Y_FIELD_NUMBER: _ClassVar[int]
    BATCH_MEAN_FIELD_NUMBER: _ClassVar[int]
    BATCH_VARIANCE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_1_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_3_FIELD_NUMBER: _ClassVar[int]
    y: _tensor_pb2.Tensor
    batch_mean: _tensor_pb2.Tensor
    batch_variance: _tensor_pb2.Tensor
    reserve_space_1: _tensor_pb2.Tensor
    reserve_space_2: _tensor_pb2.Tensor
    reserve_space_3: _tensor_pb2.Tensor
    def __init__(self, y: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., batch_mean: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., batch_variance: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_1: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_2: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_3: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class FusedBatchNormGradRequest(_message.Message):
    __slots__ = ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2", "reserve_space_3", "epsilon", "data_format", "is_training", "placement")
    Y_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_1_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_3_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DATA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    y_backprop: _tensor_pb2.Tensor
    x: _tensor_pb2.Tensor
    scale: _tensor_pb2.Tensor
    reserve_space_1: _tensor_pb2.Tensor
    reserve_space_2: _tensor_pb2.Tensor
    reserve_space_3: _tensor_pb2.Tensor
    epsilon: float
    data_format: str
    is_training: bool
    placement: _tensor_pb2.Placement
    def __init__(self, y_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., x: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scale: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_1: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_2: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_3: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., epsilon: _Optional[float] = ..., data_format: _Optional[str] = ..., is_training: bool = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class FusedBatchNormGradResponse(_message.Message):
    __slots__ = ("x_backprop", "scale_backprop", "offset_backprop", "reserve_space_4", "reserve_space_5")
    X_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    SCALE_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_4_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_5_FIELD_NUMBER: _ClassVar[int]
    x_backprop: _tensor_pb2.Tensor
    scale_backprop: _tensor_pb2.Tensor
    offset_backprop: _tensor_pb2.Tensor
    reserve_space_4: _tensor_pb2.Tensor
    reserve_space_5: _tensor_pb2.Tensor
    def __init__(self, x_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scale_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., offset_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_4: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space_5: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
