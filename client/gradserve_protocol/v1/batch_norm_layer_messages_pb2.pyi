import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as _batch_norm_layer_pb2
from gradserve_protocol.v1 import layer_pb2 as _layer_pb2
from gradserve_protocol.v1 import lease_pb2 as _lease_pb2
from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateBatchNormLayerRequest(_message.Message):
    __slots__ = ("layer", "config", "reuse", "creation_id", "input_dtype", "input_shape", "lifetime")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    CREATION_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    INPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    config: _batch_norm_layer_pb2.BatchNormConfig
    reuse: _layer_pb2.LayerReuse
    creation_id: str
    input_dtype: _tensor_pb2.DataType
    input_shape: _containers.RepeatedScalarFieldContainer[int]
    lifetime: _lease_pb2.Lifetime
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., config: _Optional[_Union[_batch_norm_layer_pb2.BatchNormConfig, _Mapping]] = ..., reuse: _Optional[_Union[_layer_pb2.LayerReuse, str]] = ..., creation_id: _Optional[str] = ..., input_dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., input_shape: _Optional[_Iterable[int]] = ..., lifetime: _Optional[_Union[_lease_pb2.Lifetime, _Mapping]] = ...) -> None: ...

class CreateBatchNormLayerResponse(_message.Message):
    __slots__ = ("info", "created")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    info: _batch_norm_layer_pb2.BatchNormLayerInfo
    created: bool
    def __init__(self, info: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerInfo, _Mapping]] = ..., created: bool = ...) -> None: ...

class DescribeBatchNormLayerRequest(_message.Message):
    __slots__ = ("layer", "collection")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    collection: str
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., collection: _Optional[str] = ...) -> None: ...

class DescribeBatchNormLayerResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _batch_norm_layer_pb2.BatchNormLayerInfo
    def __init__(self, info: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerInfo, _Mapping]] = ...) -> None: ...

class ListBatchNormLayersRequest(_message.Message):
    __slots__ = ("container", "scope", "collection", "page_size", "page_token")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    container: str
    scope: str
    collection: str
    page_size: int
    page_token: str
    def __init__(self, container: _Optional[str] = ..., scope: _Optional[str] = ..., collection: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBatchNormLayersResponse(_message.Message):
    __slots__ = ("layers", "next_page_token")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[_batch_norm_layer_pb2.BatchNormLayerInfo]
    next_page_token: str
    def __init__(self, layers: _Optional[_Iterable[_Union[_batch_norm_layer_pb2.BatchNormLayerInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteBatchNormLayerRequest(_message.Message):
    __slots__ = ("layer",)
    LAYER_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ...) -> None: ...

class DeleteBatchNormLayerResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...

class BatchNormForwardRequest(_message.Message):
    __slots__ = ("layer", "inputs", "is_training", "batch_weights", "adjustment_scale", "adjustment_bias", "forward_id", "keep_for_backward", "lease", "released_forward_ids", "placement")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    BATCH_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADJUSTMENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    ADJUSTMENT_BIAS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_FOR_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FORWARD_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    inputs: _tensor_pb2.Tensor
    is_training: bool
    batch_weights: _tensor_pb2.Tensor
    adjustment_scale: _tensor_pb2.Tensor
    adjustment_bias: _tensor_pb2.Tensor
    forward_id: str
    keep_for_backward: bool
    lease: _duration_pb2.Duration
    released_forward_ids: _containers.RepeatedScalarFieldContainer[str]
    placement: _tensor_pb2.Placement
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., inputs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., is_training: bool = ..., batch_weights: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., adjustment_scale: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., adjustment_bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., forward_id: _Optional[str] = ..., keep_for_backward: bool = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., released_forward_ids: _Optional[_Iterable[str]] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class BatchNormForwardResponse(_message.Message):
    __slots__ = ("outputs", "forward_id", "has_pending_updates", "implementation", "regularization_losses", "warnings", "drawn_adjustment_scale", "drawn_adjustment_bias")
    class RegularizationLossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_PENDING_UPDATES_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    REGULARIZATION_LOSSES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DRAWN_ADJUSTMENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    DRAWN_ADJUSTMENT_BIAS_FIELD_NUMBER: _ClassVar[int]
    outputs: _tensor_pb2.Tensor
    forward_id: str
    has_pending_updates: bool
    implementation: _batch_norm_layer_pb2.BatchNormImplementation
    regularization_losses: _containers.ScalarMap[str, float]
    warnings: _containers.RepeatedCompositeFieldContainer[_layer_pb2.IgnoredArgument]
    drawn_adjustment_scale: _tensor_pb2.Tensor
    drawn_adjustment_bias: _tensor_pb2.Tensor
    def __init__(self, outputs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., forward_id: _Optional[str] = ..., has_pending_updates: bool = ..., implementation: _Optional[_Union[_batch_norm_layer_pb2.BatchNormImplementation, str]] = ..., regularization_losses: _Optional[_Mapping[str, float]] = ..., warnings: _Optional[_Iterable[_Union[_layer_pb2.IgnoredArgument, _Mapping]]] = ..., drawn_adjustment_scale: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., drawn_adjustment_bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class BatchNormBackwardRequest(_message.Message):
    __slots__ = ("layer", "forward_id", "outputs_gradient", "retain_forward", "placement")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FORWARD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    forward_id: str
    outputs_gradient: _tensor_pb2.Tensor
    retain_forward: bool
    placement: _tensor_pb2.Placement
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., forward_id: _Optional[str] = ..., outputs_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., retain_forward: bool = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class BatchNormBackwardResponse(_message.Message):
    __slots__ = ("inputs_gradient", "beta_gradient", "gamma_gradient", "batch_weights_gradient", "adjustment_scale_gradient", "adjustment_bias_gradient", "beta_regularization_gradient", "gamma_regularization_gradient")
    INPUTS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BETA_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    GAMMA_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BATCH_WEIGHTS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    ADJUSTMENT_SCALE_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    ADJUSTMENT_BIAS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BETA_REGULARIZATION_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    GAMMA_REGULARIZATION_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    inputs_gradient: _tensor_pb2.Tensor
    beta_gradient: _tensor_pb2.Tensor
    gamma_gradient: _tensor_pb2.Tensor
    batch_weights_gradient: _tensor_pb2.Tensor
    adjustment_scale_gradient: _tensor_pb2.Tensor
    adjustment_bias_gradient: _tensor_pb2.Tensor
    beta_regularization_gradient: _tensor_pb2.Tensor
    gamma_regularization_gradient: _tensor_pb2.Tensor
    def __init__(self, inputs_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., beta_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., gamma_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., batch_weights_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., adjustment_scale_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., adjustment_bias_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., beta_regularization_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., gamma_regularization_gradient: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ReleaseBatchNormForwardsRequest(_message.Message):
    __slots__ = ("layer", "forward_ids", "keep_updates")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FORWARD_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_UPDATES_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    forward_ids: _containers.RepeatedScalarFieldContainer[str]
    keep_updates: bool
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., forward_ids: _Optional[_Iterable[str]] = ..., keep_updates: bool = ...) -> None: ...

class ReleaseBatchNormForwardsResponse(_message.Message):
    __slots__ = ("num_released",)
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    def __init__(self, num_released: _Optional[int] = ...) -> None: ...

class RunBatchNormUpdatesRequest(_message.Message):
    __slots__ = ("layer", "collection", "forward_ids")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    FORWARD_IDS_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    collection: _layer_pb2.LayerCollectionRef
    forward_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., collection: _Optional[_Union[_layer_pb2.LayerCollectionRef, _Mapping]] = ..., forward_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RunBatchNormUpdatesResponse(_message.Message):
    __slots__ = ("num_run",)
    NUM_RUN_FIELD_NUMBER: _ClassVar[int]
    num_run: int
    def __init__(self, num_run: _Optional[int] = ...) -> None: ...

class GetBatchNormVariablesRequest(_message.Message):
    __slots__ = ("layer", "names", "placement")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    names: _containers.RepeatedScalarFieldContainer[str]
    placement: _tensor_pb2.Placement
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class GetBatchNormVariablesResponse(_message.Message):
    __slots__ = ("variables",)
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedCompositeFieldContainer[_layer_pb2.NamedTensor]
    def __init__(self, variables: _Optional[_Iterable[_Union[_layer_pb2.NamedTensor, _Mapping]]] = ...) -> None: ...

class SetBatchNormVariablesRequest(_message.Message):
    __slots__ = ("layer", "variables")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    layer: _batch_norm_layer_pb2.BatchNormLayerRef
    variables: _containers.RepeatedCompositeFieldContainer[_layer_pb2.NamedTensor]
    def __init__(self, layer: _Optional[_Union[_batch_norm_layer_pb2.BatchNormLayerRef, _Mapping]] = ..., variables: _Optional[_Iterable[_Union[_layer_pb2.NamedTensor, _Mapping]]] = ...) -> None: ...

class SetBatchNormVariablesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
