from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerReuse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_REUSE_UNSPECIFIED: _ClassVar[LayerReuse]
    LAYER_REUSE_REQUIRED: _ClassVar[LayerReuse]
    LAYER_REUSE_FORBIDDEN: _ClassVar[LayerReuse]
LAYER_REUSE_UNSPECIFIED: LayerReuse
LAYER_REUSE_REQUIRED: LayerReuse
LAYER_REUSE_FORBIDDEN: LayerReuse

class Initializer(_message.Message):
    __slots__ = ("tensor", "named")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    tensor: _tensor_pb2.Tensor
    named: NamedInitializer
    def __init__(self, tensor: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., named: _Optional[_Union[NamedInitializer, _Mapping]] = ...) -> None: ...

class NamedInitializer(_message.Message):
    __slots__ = ("name", "value", "minval", "maxval", "mean", "stddev", "seed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MINVAL_FIELD_NUMBER: _ClassVar[int]
    MAXVAL_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STDDEV_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    minval: float
    maxval: float
    mean: float
    stddev: float
    seed: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., minval: _Optional[float] = ..., maxval: _Optional[float] = ..., mean: _Optional[float] = ..., stddev: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Regularizer(_message.Message):
    __slots__ = ("name", "l1", "l2")
    NAME_FIELD_NUMBER: _ClassVar[int]
    L1_FIELD_NUMBER: _ClassVar[int]
    L2_FIELD_NUMBER: _ClassVar[int]
    name: str
    l1: float
    l2: float
    def __init__(self, name: _Optional[str] = ..., l1: _Optional[float] = ..., l2: _Optional[float] = ...) -> None: ...

class CollectionNames(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class IgnoredArgument(_message.Message):
    __slots__ = ("argument", "reason")
    ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    argument: str
    reason: str
    def __init__(self, argument: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class VariableInfo(_message.Message):
    __slots__ = ("name", "spec", "trainable", "collections")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: _tensor_pb2.TensorSpec
    trainable: bool
    collections: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[_tensor_pb2.TensorSpec, _Mapping]] = ..., trainable: bool = ..., collections: _Optional[_Iterable[str]] = ...) -> None: ...

class NamedTensor(_message.Message):
    __slots__ = ("name", "tensor")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensor: _tensor_pb2.Tensor
    def __init__(self, name: _Optional[str] = ..., tensor: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class LayerCollectionRef(_message.Message):
    __slots__ = ("container", "name")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    container: str
    name: str
    def __init__(self, container: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...
