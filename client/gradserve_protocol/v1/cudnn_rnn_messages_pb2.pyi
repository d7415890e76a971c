from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CudnnRNNRequest(_message.Message):
    __slots__ = ("input", "input_h", "params", "input_c", "sequence_lengths", "rnn_mode", "input_mode", "direction", "dropout", "seed", "seed2", "num_proj", "time_major", "is_training", "placement")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    INPUT_H_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    INPUT_C_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    RNN_MODE_FIELD_NUMBER: _ClassVar[int]
    INPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SEED2_FIELD_NUMBER: _ClassVar[int]
    NUM_PROJ_FIELD_NUMBER: _ClassVar[int]
    TIME_MAJOR_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    input: _tensor_pb2.Tensor
    input_h: _tensor_pb2.Tensor
    params: _tensor_pb2.Tensor
    input_c: _tensor_pb2.Tensor
    sequence_lengths: _tensor_pb2.Tensor
    rnn_mode: str
    input_mode: str
    direction: str
    dropout: float
    seed: int
    seed2: int
    num_proj: int
    time_major: bool
    is_training: bool
    placement: _tensor_pb2.Placement
    def __init__(self, input: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., input_h: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., params: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., input_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sequence_lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rnn_mode: _Optional[str] = ..., input_mode: _Optional[str] = ..., direction: _Optional[str] = ..., dropout: _Optional[float] = ..., seed: _Optional[int] = ..., seed2: _Optional[int] = ..., num_proj: _Optional[int] = ..., time_major: bool = ..., is_training: bool = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class CudnnRNNResponse(_message.Message):
    __slots__ = ("output", "output_h", "output_c", "reserve_space", "host_reserved")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_H_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_C_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_FIELD_NUMBER: _ClassVar[int]
    HOST_RESERVED_FIELD_NUMBER: _ClassVar[int]
    output: _tensor_pb2.Tensor
    output_h: _tensor_pb2.Tensor
    output_c: _tensor_pb2.Tensor
    reserve_space: _tensor_pb2.Tensor
    host_reserved: _tensor_pb2.Tensor
    def __init__(self, output: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_h: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., host_reserved: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CudnnRNNBackpropRequest(_message.Message):
    __slots__ = ("input", "input_h", "params", "output", "output_h", "output_backprop", "output_h_backprop", "reserve_space", "input_c", "sequence_lengths", "output_c", "output_c_backprop", "host_reserved", "rnn_mode", "input_mode", "direction", "dropout", "seed", "seed2", "num_proj", "time_major", "placement")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    INPUT_H_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_H_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_H_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_FIELD_NUMBER: _ClassVar[int]
    INPUT_C_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_C_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_C_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    HOST_RESERVED_FIELD_NUMBER: _ClassVar[int]
    RNN_MODE_FIELD_NUMBER: _ClassVar[int]
    INPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SEED2_FIELD_NUMBER: _ClassVar[int]
    NUM_PROJ_FIELD_NUMBER: _ClassVar[int]
    TIME_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    input: _tensor_pb2.Tensor
    input_h: _tensor_pb2.Tensor
    params: _tensor_pb2.Tensor
    output: _tensor_pb2.Tensor
    output_h: _tensor_pb2.Tensor
    output_backprop: _tensor_pb2.Tensor
    output_h_backprop: _tensor_pb2.Tensor
    reserve_space: _tensor_pb2.Tensor
    input_c: _tensor_pb2.Tensor
    sequence_lengths: _tensor_pb2.Tensor
    output_c: _tensor_pb2.Tensor
    output_c_backprop: _tensor_pb2.Tensor
    host_reserved: _tensor_pb2.Tensor
    rnn_mode: str
    input_mode: str
    direction: str
    dropout: float
    seed: int
    seed2: int
    num_proj: int
    time_major: bool
    placement: _tensor_pb2.Placement
    def __init__(self, input: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., input_h: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., params: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_h: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_h_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., reserve_space: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., input_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sequence_lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_c: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_c_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., host_reserved: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rnn_mode: _Optional[str] = ..., input_mode: _Optional[str] = ..., direction: _Optional[str] = ..., dropout: _Optional[float] = ..., seed: _Optional[int] = ..., seed2: _Optional[int] = ..., num_proj: _Optional[int] = ..., time_major: bool = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class CudnnRNNBackpropResponse(_message.Message):
    __slots__ = ("input_backprop", "input_h_backprop", "input_c_backprop", "params_backprop")
    INPUT_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    INPUT_H_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    INPUT_C_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    PARAMS_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    input_backprop: _tensor_pb2.Tensor
    input_h_backprop: _tensor_pb2.Tensor
    input_c_backprop: _tensor_pb2.Tensor
    params_backprop: _tensor_pb2.Tensor
    def __init__(self, input_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., input_h_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., input_c_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., params_backprop: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CudnnRNNParamsSizeRequest(_message.Message):
    __slots__ = ("num_layers", "num_units", "input_size", "rnn_mode", "input_mode", "direction", "num_proj", "s", "placement")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    INPUT_SIZE_FIELD_NUMBER: _ClassVar[int]
    RNN_MODE_FIELD_NUMBER: _ClassVar[int]
    INPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROJ_FIELD_NUMBER: _ClassVar[int]
    S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_units: int
    input_size: int
    rnn_mode: str
    input_mode: str
    direction: str
    num_proj: int
    s: str
    placement: _tensor_pb2.Placement
    def __init__(self, num_layers: _Optional[int] = ..., num_units: _Optional[int] = ..., input_size: _Optional[int] = ..., rnn_mode: _Optional[str] = ..., input_mode: _Optional[str] = ..., direction: _Optional[str] = ..., num_proj: _Optional[int] = ..., s: _Optional[str] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class CudnnRNNParamsSizeResponse(_message.Message):
    __slots__ = ("params_size",)
    PARAMS_SIZE_FIELD_NUMBER: _ClassVar[int]
    params_size: _tensor_pb2.Tensor
    def __init__(self, params_size: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CudnnRNNCanonicalToParamsRequest(_message.Message):
    __slots__ = ("weights", "biases", "num_layers", "num_units", "input_size", "rnn_mode", "input_mode", "direction", "num_proj", "placement")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    INPUT_SIZE_FIELD_NUMBER: _ClassVar[int]
    RNN_MODE_FIELD_NUMBER: _ClassVar[int]
    INPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROJ_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    biases: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    num_layers: int
    num_units: int
    input_size: int
    rnn_mode: str
    input_mode: str
    direction: str
    num_proj: int
    placement: _tensor_pb2.Placement
    def __init__(self, weights: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ..., biases: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ..., num_layers: _Optional[int] = ..., num_units: _Optional[int] = ..., input_size: _Optional[int] = ..., rnn_mode: _Optional[str] = ..., input_mode: _Optional[str] = ..., direction: _Optional[str] = ..., num_proj: _Optional[int] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class CudnnRNNCanonicalToParamsResponse(_message.Message):
    __slots__ = ("params",)
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    params: _tensor_pb2.Tensor
    def __init__(self, params: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CudnnRNNParamsToCanonicalRequest(_message.Message):
    __slots__ = ("params", "num_layers", "num_units", "input_size", "rnn_mode", "input_mode", "direction", "num_proj", "num_params_weights", "num_params_biases", "placement")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    INPUT_SIZE_FIELD_NUMBER: _ClassVar[int]
    RNN_MODE_FIELD_NUMBER: _ClassVar[int]
    INPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROJ_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMS_BIASES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    params: _tensor_pb2.Tensor
    num_layers: int
    num_units: int
    input_size: int
    rnn_mode: str
    input_mode: str
    direction: str
    num_proj: int
    num_params_weights: int
    num_params_biases: int
    placement: _tensor_pb2.Placement
    def __init__(self, params: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., num_layers: _Optional[int] = ..., num_units: _Optional[int] = ..., input_size: _Optional[int] = ..., rnn_mode: _Optional[str] = ..., input_mode: _Optional[str] = ..., direction: _Optional[str] = ..., num_proj: _Optional[int] = ..., num_params_weights: _Optional[int] = ..., num_params_biases: _Optional[int] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class CudnnRNNParamsToCanonicalResponse(_message.Message):
    __slots__ = ("weights", "biases")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    biases: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    def __init__(self, weights: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ..., biases: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ...) -> None: ...
