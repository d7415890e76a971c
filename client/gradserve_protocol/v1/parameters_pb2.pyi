import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from gradserve_protocol.v1 import accumulator_pb2 as _accumulator_pb2
from gradserve_protocol.v1 import codecs_pb2 as _codecs_pb2
from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UpdateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_KIND_UNSPECIFIED: _ClassVar[UpdateKind]
    UPDATE_KIND_DELTA: _ClassVar[UpdateKind]
    UPDATE_KIND_GRADIENT: _ClassVar[UpdateKind]

class Normalization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NORMALIZATION_UNSPECIFIED: _ClassVar[Normalization]
    NORMALIZATION_WEIGHTS: _ClassVar[Normalization]
    NORMALIZATION_COUNT: _ClassVar[Normalization]
UPDATE_KIND_UNSPECIFIED: UpdateKind
UPDATE_KIND_DELTA: UpdateKind
UPDATE_KIND_GRADIENT: UpdateKind
NORMALIZATION_UNSPECIFIED: Normalization
NORMALIZATION_WEIGHTS: Normalization
NORMALIZATION_COUNT: Normalization

class Optimizer(_message.Message):
    __slots__ = ("sgd", "adam", "adagrad", "yogi", "flower_adam", "flower_yogi", "flower_adagrad", "flower_avg_m", "adagrad_optax")
    SGD_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    YOGI_FIELD_NUMBER: _ClassVar[int]
    FLOWER_ADAM_FIELD_NUMBER: _ClassVar[int]
    FLOWER_YOGI_FIELD_NUMBER: _ClassVar[int]
    FLOWER_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    FLOWER_AVG_M_FIELD_NUMBER: _ClassVar[int]
    ADAGRAD_OPTAX_FIELD_NUMBER: _ClassVar[int]
    sgd: Sgd
    adam: Adam
    adagrad: Adagrad
    yogi: Yogi
    flower_adam: FlowerAdam
    flower_yogi: FlowerYogi
    flower_adagrad: FlowerAdagrad
    flower_avg_m: FlowerAvgM
    adagrad_optax: AdagradOptax
    def __init__(self, sgd: _Optional[_Union[Sgd, _Mapping]] = ..., adam: _Optional[_Union[Adam, _Mapping]] = ..., adagrad: _Optional[_Union[Adagrad, _Mapping]] = ..., yogi: _Optional[_Union[Yogi, _Mapping]] = ..., flower_adam: _Optional[_Union[FlowerAdam, _Mapping]] = ..., flower_yogi: _Optional[_Union[FlowerYogi, _Mapping]] = ..., flower_adagrad: _Optional[_Union[FlowerAdagrad, _Mapping]] = ..., flower_avg_m: _Optional[_Union[FlowerAvgM, _Mapping]] = ..., adagrad_optax: _Optional[_Union[AdagradOptax, _Mapping]] = ...) -> None: ...

class Sgd(_message.Message):
    __slots__ = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    LR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    DAMPENING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    NESTEROV_FIELD_NUMBER: _ClassVar[int]
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    def __init__(self, lr: _Optional[float] = ..., momentum: _Optional[float] = ..., dampening: _Optional[float] = ..., weight_decay: _Optional[float] = ..., nesterov: bool = ...) -> None: ...

class Adam(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    DECOUPLED_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., decoupled: bool = ...) -> None: ...

class Adagrad(_message.Message):
    __slots__ = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    LR_FIELD_NUMBER: _ClassVar[int]
    LR_DECAY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    lr: float
    lr_decay: float
    weight_decay: float
    initial_accumulator_value: float
    eps: float
    def __init__(self, lr: _Optional[float] = ..., lr_decay: _Optional[float] = ..., weight_decay: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., eps: _Optional[float] = ...) -> None: ...

class Yogi(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "initial_accumulator_value")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    initial_accumulator_value: float
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ...) -> None: ...

class FlowerAdam(_message.Message):
    __slots__ = ("eta", "beta1", "beta2", "tau")
    ETA_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    eta: float
    beta1: float
    beta2: float
    tau: float
    def __init__(self, eta: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., tau: _Optional[float] = ...) -> None: ...

class FlowerYogi(_message.Message):
    __slots__ = ("eta", "beta1", "beta2", "tau")
    ETA_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    eta: float
    beta1: float
    beta2: float
    tau: float
    def __init__(self, eta: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., tau: _Optional[float] = ...) -> None: ...

class FlowerAdagrad(_message.Message):
    __slots__ = ("eta", "tau")
    ETA_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    eta: float
    tau: float
    def __init__(self, eta: _Optional[float] = ..., tau: _Optional[float] = ...) -> None: ...

class FlowerAvgM(_message.Message):
    __slots__ = ("server_learning_rate", "server_momentum")
    SERVER_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SERVER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    server_learning_rate: float
    server_momentum: float
    def __init__(self, server_learning_rate: _Optional[float] = ..., server_momentum: _Optional[float] = ...) -> None: ...

class AdagradOptax(_message.Message):
    __slots__ = ("lr", "initial_accumulator_value", "eps")
    LR_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    lr: float
    initial_accumulator_value: float
    eps: float
    def __init__(self, lr: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., eps: _Optional[float] = ...) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("warmup", "constant", "linear", "cosine")
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    LINEAR_FIELD_NUMBER: _ClassVar[int]
    COSINE_FIELD_NUMBER: _ClassVar[int]
    warmup: int
    constant: ConstantSchedule
    linear: LinearSchedule
    cosine: CosineSchedule
    def __init__(self, warmup: _Optional[int] = ..., constant: _Optional[_Union[ConstantSchedule, _Mapping]] = ..., linear: _Optional[_Union[LinearSchedule, _Mapping]] = ..., cosine: _Optional[_Union[CosineSchedule, _Mapping]] = ...) -> None: ...

class ConstantSchedule(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LinearSchedule(_message.Message):
    __slots__ = ("rounds", "end")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    end: float
    def __init__(self, rounds: _Optional[int] = ..., end: _Optional[float] = ...) -> None: ...

class CosineSchedule(_message.Message):
    __slots__ = ("rounds", "end")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    end: float
    def __init__(self, rounds: _Optional[int] = ..., end: _Optional[float] = ...) -> None: ...

class RoundRules(_message.Message):
    __slots__ = ("num_required", "min_required", "expected_count", "expected_alive", "grace", "adaptive_grace", "max_grace", "min_interval", "deadline")
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    MIN_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ALIVE_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_GRACE_FIELD_NUMBER: _ClassVar[int]
    MAX_GRACE_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    num_required: int
    min_required: int
    expected_count: int
    expected_alive: bool
    grace: _duration_pb2.Duration
    adaptive_grace: bool
    max_grace: _duration_pb2.Duration
    min_interval: _duration_pb2.Duration
    deadline: _duration_pb2.Duration
    def __init__(self, num_required: _Optional[int] = ..., min_required: _Optional[int] = ..., expected_count: _Optional[int] = ..., expected_alive: bool = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., adaptive_grace: bool = ..., max_grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., min_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Staleness(_message.Message):
    __slots__ = ("max", "constant", "polynomial", "exponential")
    MAX_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    POLYNOMIAL_FIELD_NUMBER: _ClassVar[int]
    EXPONENTIAL_FIELD_NUMBER: _ClassVar[int]
    max: int
    constant: ConstantDiscount
    polynomial: PolynomialDiscount
    exponential: ExponentialDiscount
    def __init__(self, max: _Optional[int] = ..., constant: _Optional[_Union[ConstantDiscount, _Mapping]] = ..., polynomial: _Optional[_Union[PolynomialDiscount, _Mapping]] = ..., exponential: _Optional[_Union[ExponentialDiscount, _Mapping]] = ...) -> None: ...

class ConstantDiscount(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PolynomialDiscount(_message.Message):
    __slots__ = ("exponent",)
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    exponent: float
    def __init__(self, exponent: _Optional[float] = ...) -> None: ...

class ExponentialDiscount(_message.Message):
    __slots__ = ("base",)
    BASE_FIELD_NUMBER: _ClassVar[int]
    base: float
    def __init__(self, base: _Optional[float] = ...) -> None: ...

class UpdateReduction(_message.Message):
    __slots__ = ("mean", "sum", "median", "trimmed_mean", "krum", "geometric_median", "maximum", "report_only")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_MEAN_FIELD_NUMBER: _ClassVar[int]
    KRUM_FIELD_NUMBER: _ClassVar[int]
    GEOMETRIC_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    REPORT_ONLY_FIELD_NUMBER: _ClassVar[int]
    mean: MeanReduction
    sum: SumReduction
    median: MedianReduction
    trimmed_mean: TrimmedMeanReduction
    krum: KrumReduction
    geometric_median: GeometricMedianReduction
    maximum: MaximumReduction
    report_only: bool
    def __init__(self, mean: _Optional[_Union[MeanReduction, _Mapping]] = ..., sum: _Optional[_Union[SumReduction, _Mapping]] = ..., median: _Optional[_Union[MedianReduction, _Mapping]] = ..., trimmed_mean: _Optional[_Union[TrimmedMeanReduction, _Mapping]] = ..., krum: _Optional[_Union[KrumReduction, _Mapping]] = ..., geometric_median: _Optional[_Union[GeometricMedianReduction, _Mapping]] = ..., maximum: _Optional[_Union[MaximumReduction, _Mapping]] = ..., report_only: bool = ...) -> None: ...

class MeanReduction(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SumReduction(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MedianReduction(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MaximumReduction(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrimmedMeanReduction(_message.Message):
    __slots__ = ("fraction",)
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    def __init__(self, fraction: _Optional[float] = ...) -> None: ...

class KrumReduction(_message.Message):
    __slots__ = ("num_byzantine", "num_selected")
    NUM_BYZANTINE_FIELD_NUMBER: _ClassVar[int]
    NUM_SELECTED_FIELD_NUMBER: _ClassVar[int]
    num_byzantine: int
    num_selected: int
    def __init__(self, num_byzantine: _Optional[int] = ..., num_selected: _Optional[int] = ...) -> None: ...

class GeometricMedianReduction(_message.Message):
    __slots__ = ("max_iterations", "tolerance")
    MAX_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    max_iterations: int
    tolerance: float
    def __init__(self, max_iterations: _Optional[int] = ..., tolerance: _Optional[float] = ...) -> None: ...

class ParametersSpec(_message.Message):
    __slots__ = ("components", "update", "optimizer", "schedule", "rounds", "staleness", "normalization", "reduction", "clip_norm", "keep_versions", "deterministic", "accept_non_finite", "many_per_worker", "durability", "agreement", "keep_rounds", "num_shards")
    class AgreementEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZATION_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    KEEP_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    MANY_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    KEEP_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentSpec]
    update: UpdateKind
    optimizer: Optimizer
    schedule: Schedule
    rounds: RoundRules
    staleness: Staleness
    normalization: Normalization
    reduction: UpdateReduction
    clip_norm: float
    keep_versions: int
    deterministic: bool
    accept_non_finite: bool
    many_per_worker: bool
    durability: _accumulator_pb2.Durability
    agreement: _containers.ScalarMap[str, str]
    keep_rounds: int
    num_shards: int
    def __init__(self, components: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentSpec, _Mapping]]] = ..., update: _Optional[_Union[UpdateKind, str]] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., schedule: _Optional[_Union[Schedule, _Mapping]] = ..., rounds: _Optional[_Union[RoundRules, _Mapping]] = ..., staleness: _Optional[_Union[Staleness, _Mapping]] = ..., normalization: _Optional[_Union[Normalization, str]] = ..., reduction: _Optional[_Union[UpdateReduction, _Mapping]] = ..., clip_norm: _Optional[float] = ..., keep_versions: _Optional[int] = ..., deterministic: bool = ..., accept_non_finite: bool = ..., many_per_worker: bool = ..., durability: _Optional[_Union[_accumulator_pb2.Durability, str]] = ..., agreement: _Optional[_Mapping[str, str]] = ..., keep_rounds: _Optional[int] = ..., num_shards: _Optional[int] = ...) -> None: ...

class ParametersRef(_message.Message):
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

class ParametersInfo(_message.Message):
    __slots__ = ("parameters", "spec", "step", "digest", "num_updates", "num_waiting", "num_bytes", "worker_ids", "kept_steps", "is_private", "idle_lease", "server_incarnation", "weights", "epoch")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_PRIVATE_FIELD_NUMBER: _ClassVar[int]
    IDLE_LEASE_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    parameters: ParametersRef
    spec: ParametersSpec
    step: int
    digest: bytes
    num_updates: int
    num_waiting: int
    num_bytes: int
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    kept_steps: _containers.RepeatedScalarFieldContainer[int]
    is_private: bool
    idle_lease: _duration_pb2.Duration
    server_incarnation: str
    weights: WeightLedger
    epoch: int
    def __init__(self, parameters: _Optional[_Union[ParametersRef, _Mapping]] = ..., spec: _Optional[_Union[ParametersSpec, _Mapping]] = ..., step: _Optional[int] = ..., digest: _Optional[bytes] = ..., num_updates: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_bytes: _Optional[int] = ..., worker_ids: _Optional[_Iterable[str]] = ..., kept_steps: _Optional[_Iterable[int]] = ..., is_private: bool = ..., idle_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., server_incarnation: _Optional[str] = ..., weights: _Optional[_Union[WeightLedger, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class WeightLedger(_message.Message):
    __slots__ = ("accepted", "applied", "pending", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    accepted: float
    applied: float
    pending: float
    refused: _containers.ScalarMap[str, float]
    def __init__(self, accepted: _Optional[float] = ..., applied: _Optional[float] = ..., pending: _Optional[float] = ..., refused: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("components", "step", "num_updates", "total_weight", "worker_ids", "digest", "state", "decided", "codec")
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    step: int
    num_updates: int
    total_weight: float
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    digest: bytes
    state: OptimizerState
    decided: DecidedRound
    codec: _codecs_pb2.Codec
    def __init__(self, components: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., step: _Optional[int] = ..., num_updates: _Optional[int] = ..., total_weight: _Optional[float] = ..., worker_ids: _Optional[_Iterable[str]] = ..., digest: _Optional[bytes] = ..., state: _Optional[_Union[OptimizerState, _Mapping]] = ..., decided: _Optional[_Union[DecidedRound, _Mapping]] = ..., codec: _Optional[_Union[_codecs_pb2.Codec, str]] = ...) -> None: ...

class DecidedRound(_message.Message):
    __slots__ = ("step", "optimizer", "schedule", "part_ids", "weights", "loaded", "oldest_version", "scales", "factors", "sums")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    optimizer: Optimizer
    schedule: Schedule
    part_ids: _containers.RepeatedScalarFieldContainer[bytes]
    weights: _containers.RepeatedScalarFieldContainer[float]
    loaded: bytes
    oldest_version: int
    scales: _containers.RepeatedScalarFieldContainer[float]
    factors: _containers.RepeatedScalarFieldContainer[float]
    sums: _containers.RepeatedCompositeFieldContainer[DecidedSum]
    def __init__(self, step: _Optional[int] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., schedule: _Optional[_Union[Schedule, _Mapping]] = ..., part_ids: _Optional[_Iterable[bytes]] = ..., weights: _Optional[_Iterable[float]] = ..., loaded: _Optional[bytes] = ..., oldest_version: _Optional[int] = ..., scales: _Optional[_Iterable[float]] = ..., factors: _Optional[_Iterable[float]] = ..., sums: _Optional[_Iterable[_Union[DecidedSum, _Mapping]]] = ...) -> None: ...

class DecidedSum(_message.Message):
    __slots__ = ("index", "num_updates", "discount")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    DISCOUNT_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_updates: int
    discount: float
    def __init__(self, index: _Optional[int] = ..., num_updates: _Optional[int] = ..., discount: _Optional[float] = ...) -> None: ...

class Measurement(_message.Message):
    __slots__ = ("server", "squared_norm", "squared_distances")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    SQUARED_DISTANCES_FIELD_NUMBER: _ClassVar[int]
    server: int
    squared_norm: _containers.RepeatedScalarFieldContainer[float]
    squared_distances: _containers.RepeatedCompositeFieldContainer[SquaredDistance]
    def __init__(self, server: _Optional[int] = ..., squared_norm: _Optional[_Iterable[float]] = ..., squared_distances: _Optional[_Iterable[_Union[SquaredDistance, _Mapping]]] = ...) -> None: ...

class SquaredDistance(_message.Message):
    __slots__ = ("part_id", "terms")
    PART_ID_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    part_id: bytes
    terms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, part_id: _Optional[bytes] = ..., terms: _Optional[_Iterable[float]] = ...) -> None: ...

class OptimizerState(_message.Message):
    __slots__ = ("slots", "component_steps", "rounds", "optimizer")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[Slot]
    component_steps: _containers.RepeatedScalarFieldContainer[int]
    rounds: int
    optimizer: Optimizer
    def __init__(self, slots: _Optional[_Iterable[_Union[Slot, _Mapping]]] = ..., component_steps: _Optional[_Iterable[int]] = ..., rounds: _Optional[int] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ...) -> None: ...

class Slot(_message.Message):
    __slots__ = ("name", "component", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    component: str
    value: _tensor_pb2.Tensor
    def __init__(self, name: _Optional[str] = ..., component: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class RoundUpdate(_message.Message):
    __slots__ = ("worker_id", "weight_asked", "weight", "staleness", "norm", "cosine", "num_bytes", "dropped", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_ASKED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    COSINE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    weight_asked: float
    weight: float
    staleness: int
    norm: float
    cosine: float
    num_bytes: int
    dropped: bool
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, worker_id: _Optional[str] = ..., weight_asked: _Optional[float] = ..., weight: _Optional[float] = ..., staleness: _Optional[int] = ..., norm: _Optional[float] = ..., cosine: _Optional[float] = ..., num_bytes: _Optional[int] = ..., dropped: bool = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("worker_id", "weight", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    weight: float
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., weight: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("step", "reason", "end_time", "updates", "refusals", "digest_before", "digest_after", "lr", "optimizer", "hash", "decided", "metrics", "evaluation")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_AFTER_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    step: int
    reason: str
    end_time: _timestamp_pb2.Timestamp
    updates: _containers.RepeatedCompositeFieldContainer[RoundUpdate]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    digest_before: bytes
    digest_after: bytes
    lr: float
    optimizer: Optimizer
    hash: bytes
    decided: DecidedRound
    metrics: _containers.ScalarMap[str, float]
    evaluation: Evaluation
    def __init__(self, step: _Optional[int] = ..., reason: _Optional[str] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., updates: _Optional[_Iterable[_Union[RoundUpdate, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., digest_before: _Optional[bytes] = ..., digest_after: _Optional[bytes] = ..., lr: _Optional[float] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., hash: _Optional[bytes] = ..., decided: _Optional[_Union[DecidedRound, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("step", "metrics", "weight", "worker_ids", "num_reports")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPORTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    metrics: _containers.ScalarMap[str, float]
    weight: float
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    num_reports: int
    def __init__(self, step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., weight: _Optional[float] = ..., worker_ids: _Optional[_Iterable[str]] = ..., num_reports: _Optional[int] = ...) -> None: ...
