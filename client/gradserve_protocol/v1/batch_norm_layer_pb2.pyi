import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from gradserve_protocol.v1 import accumulator_pb2 as _accumulator_pb2
from gradserve_protocol.v1 import layer_pb2 as _layer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchNormImplementation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_NORM_IMPLEMENTATION_UNSPECIFIED: _ClassVar[BatchNormImplementation]
    BATCH_NORM_IMPLEMENTATION_FUSED: _ClassVar[BatchNormImplementation]
    BATCH_NORM_IMPLEMENTATION_CORE_FUSED: _ClassVar[BatchNormImplementation]
    BATCH_NORM_IMPLEMENTATION_CORE: _ClassVar[BatchNormImplementation]
    BATCH_NORM_IMPLEMENTATION_LEGACY: _ClassVar[BatchNormImplementation]
BATCH_NORM_IMPLEMENTATION_UNSPECIFIED: BatchNormImplementation
BATCH_NORM_IMPLEMENTATION_FUSED: BatchNormImplementation
BATCH_NORM_IMPLEMENTATION_CORE_FUSED: BatchNormImplementation
BATCH_NORM_IMPLEMENTATION_CORE: BatchNormImplementation
BATCH_NORM_IMPLEMENTATION_LEGACY: BatchNormImplementation

class BatchNormLayerRef(_message.Message):
    __slots__ = ("container", "name", "incarnation")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    container: str
    name: str
    incarnation: str
    def __init__(self, container: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class BatchNormConfig(_message.Message):
    __slots__ = ("decay", "center", "scale", "epsilon", "activation_fn", "param_initializers", "param_regularizers", "in_place_updates", "updates_collections", "variables_collections", "outputs_collections", "trainable", "fused", "data_format", "zero_debias_moving_mean", "renorm", "renorm_clipping", "renorm_decay", "adjustment", "renorm_zero_debias", "durability")
    class ParamInitializersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _layer_pb2.Initializer
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_layer_pb2.Initializer, _Mapping]] = ...) -> None: ...
    class ParamRegularizersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _layer_pb2.Regularizer
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_layer_pb2.Regularizer, _Mapping]] = ...) -> None: ...
    class VariablesCollectionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _layer_pb2.CollectionNames
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_layer_pb2.CollectionNames, _Mapping]] = ...) -> None: ...
    class RenormClippingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DECAY_FIELD_NUMBER: _ClassVar[int]
    CENTER_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FN_FIELD_NUMBER: _ClassVar[int]
    PARAM_INITIALIZERS_FIELD_NUMBER: _ClassVar[int]
    PARAM_REGULARIZERS_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_UPDATES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_COLLECTIONS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_COLLECTIONS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_COLLECTIONS_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    FUSED_FIELD_NUMBER: _ClassVar[int]
    DATA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ZERO_DEBIAS_MOVING_MEAN_FIELD_NUMBER: _ClassVar[int]
    RENORM_FIELD_NUMBER: _ClassVar[int]
    RENORM_CLIPPING_FIELD_NUMBER: _ClassVar[int]
    RENORM_DECAY_FIELD_NUMBER: _ClassVar[int]
    ADJUSTMENT_FIELD_NUMBER: _ClassVar[int]
    RENORM_ZERO_DEBIAS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    decay: float
    center: bool
    scale: bool
    epsilon: float
    activation_fn: str
    param_initializers: _containers.MessageMap[str, _layer_pb2.Initializer]
    param_regularizers: _containers.MessageMap[str, _layer_pb2.Regularizer]
    in_place_updates: bool
    updates_collections: _containers.RepeatedScalarFieldContainer[str]
    variables_collections: _containers.MessageMap[str, _layer_pb2.CollectionNames]
    outputs_collections: _containers.RepeatedScalarFieldContainer[str]
    trainable: bool
    fused: bool
    data_format: str
    zero_debias_moving_mean: bool
    renorm: bool
    renorm_clipping: _containers.ScalarMap[str, float]
    renorm_decay: float
    adjustment: RandomAdjustment
    renorm_zero_debias: bool
    durability: _accumulator_pb2.Durability
    def __init__(self, decay: _Optional[float] = ..., center: bool = ..., scale: bool = ..., epsilon: _Optional[float] = ..., activation_fn: _Optional[str] = ..., param_initializers: _Optional[_Mapping[str, _layer_pb2.Initializer]] = ..., param_regularizers: _Optional[_Mapping[str, _layer_pb2.Regularizer]] = ..., in_place_updates: bool = ..., updates_collections: _Optional[_Iterable[str]] = ..., variables_collections: _Optional[_Mapping[str, _layer_pb2.CollectionNames]] = ..., outputs_collections: _Optional[_Iterable[str]] = ..., trainable: bool = ..., fused: bool = ..., data_format: _Optional[str] = ..., zero_debias_moving_mean: bool = ..., renorm: bool = ..., renorm_clipping: _Optional[_Mapping[str, float]] = ..., renorm_decay: _Optional[float] = ..., adjustment: _Optional[_Union[RandomAdjustment, _Mapping]] = ..., renorm_zero_debias: bool = ..., durability: _Optional[_Union[_accumulator_pb2.Durability, str]] = ...) -> None: ...

class RandomAdjustment(_message.Message):
    __slots__ = ("scale_min", "scale_max", "bias_min", "bias_max", "seed")
    SCALE_MIN_FIELD_NUMBER: _ClassVar[int]
    SCALE_MAX_FIELD_NUMBER: _ClassVar[int]
    BIAS_MIN_FIELD_NUMBER: _ClassVar[int]
    BIAS_MAX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    scale_min: float
    scale_max: float
    bias_min: float
    bias_max: float
    seed: int
    def __init__(self, scale_min: _Optional[float] = ..., scale_max: _Optional[float] = ..., bias_min: _Optional[float] = ..., bias_max: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class BatchNormLayerInfo(_message.Message):
    __slots__ = ("layer", "config", "variables", "num_forwards", "num_updates", "num_bytes", "warnings", "is_private", "idle_lease")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    IS_PRIVATE_FIELD_NUMBER: _ClassVar[int]
    IDLE_LEASE_FIELD_NUMBER: _ClassVar[int]
    layer: BatchNormLayerRef
    config: BatchNormConfig
    variables: _containers.RepeatedCompositeFieldContainer[_layer_pb2.VariableInfo]
    num_forwards: int
    num_updates: int
    num_bytes: int
    warnings: _containers.RepeatedCompositeFieldContainer[_layer_pb2.IgnoredArgument]
    is_private: bool
    idle_lease: _duration_pb2.Duration
    def __init__(self, layer: _Optional[_Union[BatchNormLayerRef, _Mapping]] = ..., config: _Optional[_Union[BatchNormConfig, _Mapping]] = ..., variables: _Optional[_Iterable[_Union[_layer_pb2.VariableInfo, _Mapping]]] = ..., num_forwards: _Optional[int] = ..., num_updates: _Optional[int] = ..., num_bytes: _Optional[int] = ..., warnings: _Optional[_Iterable[_Union[_layer_pb2.IgnoredArgument, _Mapping]]] = ..., is_private: bool = ..., idle_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
