import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from gradserve_protocol.v1 import codecs_pb2 as _codecs_pb2
from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCTION_UNSPECIFIED: _ClassVar[Reduction]
    REDUCTION_MEAN: _ClassVar[Reduction]
    REDUCTION_SUM: _ClassVar[Reduction]

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_DENSE: _ClassVar[Layout]
    LAYOUT_SPARSE: _ClassVar[Layout]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_NONE: _ClassVar[Durability]
    DURABILITY_ROUND: _ClassVar[Durability]
    DURABILITY_GRADIENT: _ClassVar[Durability]

class ApplyOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPLY_OUTCOME_UNSPECIFIED: _ClassVar[ApplyOutcome]
    APPLY_OUTCOME_ACCEPTED: _ClassVar[ApplyOutcome]
    APPLY_OUTCOME_STALE: _ClassVar[ApplyOutcome]
    APPLY_OUTCOME_ALREADY_COUNTED: _ClassVar[ApplyOutcome]
REDUCTION_UNSPECIFIED: Reduction
REDUCTION_MEAN: Reduction
REDUCTION_SUM: Reduction
LAYOUT_UNSPECIFIED: Layout
LAYOUT_DENSE: Layout
LAYOUT_SPARSE: Layout
DURABILITY_UNSPECIFIED: Durability
DURABILITY_NONE: Durability
DURABILITY_ROUND: Durability
DURABILITY_GRADIENT: Durability
APPLY_OUTCOME_UNSPECIFIED: ApplyOutcome
APPLY_OUTCOME_ACCEPTED: ApplyOutcome
APPLY_OUTCOME_STALE: ApplyOutcome
APPLY_OUTCOME_ALREADY_COUNTED: ApplyOutcome

class PartialShape(_message.Message):
    __slots__ = ("unknown_rank", "dims")
    UNKNOWN_RANK_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    unknown_rank: bool
    dims: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unknown_rank: bool = ..., dims: _Optional[_Iterable[int]] = ...) -> None: ...

class ComponentSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "layout", "pieces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _tensor_pb2.DataType
    shape: PartialShape
    layout: Layout
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., shape: _Optional[_Union[PartialShape, _Mapping]] = ..., layout: _Optional[_Union[Layout, str]] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("server", "num_rows")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    server: int
    num_rows: int
    def __init__(self, server: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class AccumulatorSpec(_message.Message):
    __slots__ = ("components", "reduction", "accumulate_dtype", "deterministic", "keep_averages", "one_per_worker", "refuse_non_finite", "durability", "device", "agreement", "num_shards")
    class AgreementEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    KEEP_AVERAGES_FIELD_NUMBER: _ClassVar[int]
    ONE_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    REFUSE_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedCompositeFieldContainer[ComponentSpec]
    reduction: Reduction
    accumulate_dtype: _tensor_pb2.DataType
    deterministic: bool
    keep_averages: int
    one_per_worker: bool
    refuse_non_finite: bool
    durability: Durability
    device: str
    agreement: _containers.ScalarMap[str, str]
    num_shards: int
    def __init__(self, components: _Optional[_Iterable[_Union[ComponentSpec, _Mapping]]] = ..., reduction: _Optional[_Union[Reduction, str]] = ..., accumulate_dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., deterministic: bool = ..., keep_averages: _Optional[int] = ..., one_per_worker: bool = ..., refuse_non_finite: bool = ..., durability: _Optional[_Union[Durability, str]] = ..., device: _Optional[str] = ..., agreement: _Optional[_Mapping[str, str]] = ..., num_shards: _Optional[int] = ...) -> None: ...

class AccumulatorRef(_message.Message):
    __slots__ = ("container", "name", "incarnation", "server_incarnation", "member")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    container: str
    name: str
    incarnation: str
    server_incarnation: str
    member: str
    def __init__(self, container: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., server_incarnation: _Optional[str] = ..., member: _Optional[str] = ...) -> None: ...

class AccumulatorInfo(_message.Message):
    __slots__ = ("accumulator", "spec", "global_step", "num_accumulated", "num_waiting", "num_bytes", "worker_ids", "kept_steps", "is_private", "idle_lease", "server_incarnation", "epoch", "different_workers")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCUMULATED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_PRIVATE_FIELD_NUMBER: _ClassVar[int]
    IDLE_LEASE_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    accumulator: AccumulatorRef
    spec: AccumulatorSpec
    global_step: int
    num_accumulated: int
    num_waiting: int
    num_bytes: int
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    kept_steps: _containers.RepeatedScalarFieldContainer[int]
    is_private: bool
    idle_lease: _duration_pb2.Duration
    server_incarnation: str
    epoch: int
    different_workers: _containers.RepeatedCompositeFieldContainer[DifferentWorker]
    def __init__(self, accumulator: _Optional[_Union[AccumulatorRef, _Mapping]] = ..., spec: _Optional[_Union[AccumulatorSpec, _Mapping]] = ..., global_step: _Optional[int] = ..., num_accumulated: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_bytes: _Optional[int] = ..., worker_ids: _Optional[_Iterable[str]] = ..., kept_steps: _Optional[_Iterable[int]] = ..., is_private: bool = ..., idle_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., server_incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., different_workers: _Optional[_Iterable[_Union[DifferentWorker, _Mapping]]] = ...) -> None: ...

class ComponentGradient(_message.Message):
    __slots__ = ("name", "dense", "sparse", "packed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    name: str
    dense: _tensor_pb2.Tensor
    sparse: SparseGradient
    packed: _codecs_pb2.PackedTensor
    def __init__(self, name: _Optional[str] = ..., dense: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sparse: _Optional[_Union[SparseGradient, _Mapping]] = ..., packed: _Optional[_Union[_codecs_pb2.PackedTensor, _Mapping]] = ...) -> None: ...

class SparseGradient(_message.Message):
    __slots__ = ("indices", "values", "dense_shape")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DENSE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    indices: _tensor_pb2.Tensor
    values: _tensor_pb2.Tensor
    dense_shape: DenseShape
    def __init__(self, indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., values: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., dense_shape: _Optional[_Union[DenseShape, _Mapping]] = ...) -> None: ...

class DenseShape(_message.Message):
    __slots__ = ("dims",)
    DIMS_FIELD_NUMBER: _ClassVar[int]
    dims: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dims: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestId(_message.Message):
    __slots__ = ("client_id", "sequence", "unanswered", "unanswered_since")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_SINCE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    sequence: int
    unanswered: _containers.RepeatedScalarFieldContainer[int]
    unanswered_since: int
    def __init__(self, client_id: _Optional[str] = ..., sequence: _Optional[int] = ..., unanswered: _Optional[_Iterable[int]] = ..., unanswered_since: _Optional[int] = ...) -> None: ...

class Summand(_message.Message):
    __slots__ = ("request_id", "weight", "worker_id", "parameters_digest", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    request_id: RequestId
    weight: float
    worker_id: str
    parameters_digest: bytes
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, request_id: _Optional[_Union[RequestId, _Mapping]] = ..., weight: _Optional[float] = ..., worker_id: _Optional[str] = ..., parameters_digest: _Optional[bytes] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class DifferentWorker(_message.Message):
    __slots__ = ("worker_id", "equal_at")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EQUAL_AT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    equal_at: int
    def __init__(self, worker_id: _Optional[str] = ..., equal_at: _Optional[int] = ...) -> None: ...

class Average(_message.Message):
    __slots__ = ("components", "step", "num_gradients", "total_weight", "worker_ids", "round", "parts", "different_workers")
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedCompositeFieldContainer[ComponentGradient]
    step: int
    num_gradients: int
    total_weight: float
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    round: int
    parts: RoundParts
    different_workers: _containers.RepeatedCompositeFieldContainer[DifferentWorker]
    def __init__(self, components: _Optional[_Iterable[_Union[ComponentGradient, _Mapping]]] = ..., step: _Optional[int] = ..., num_gradients: _Optional[int] = ..., total_weight: _Optional[float] = ..., worker_ids: _Optional[_Iterable[str]] = ..., round: _Optional[int] = ..., parts: _Optional[_Union[RoundParts, _Mapping]] = ..., different_workers: _Optional[_Iterable[_Union[DifferentWorker, _Mapping]]] = ...) -> None: ...

class RoundParts(_message.Message):
    __slots__ = ("home_incarnation", "part_ids", "weights", "oldest_round", "oldest_step", "sums", "epoch", "oldest_epoch")
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_ROUND_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OLDEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    home_incarnation: str
    part_ids: _containers.RepeatedScalarFieldContainer[bytes]
    weights: _containers.RepeatedScalarFieldContainer[float]
    oldest_round: int
    oldest_step: int
    sums: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    oldest_epoch: int
    def __init__(self, home_incarnation: _Optional[str] = ..., part_ids: _Optional[_Iterable[bytes]] = ..., weights: _Optional[_Iterable[float]] = ..., oldest_round: _Optional[int] = ..., oldest_step: _Optional[int] = ..., sums: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., oldest_epoch: _Optional[int] = ...) -> None: ...
