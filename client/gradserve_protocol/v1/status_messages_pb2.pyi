from gradserve_protocol.v1 import accumulator_pb2 as _accumulator_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerStatusRequest(_message.Message):
    __slots__ = ("container", "name_contains", "order", "max_accumulators", "max_rounds", "max_workers", "request_id", "max_past_runs")
    class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ORDER_UNSPECIFIED: _ClassVar[GetServerStatusRequest.Order]
        ORDER_NAME: _ClassVar[GetServerStatusRequest.Order]
        ORDER_RATE: _ClassVar[GetServerStatusRequest.Order]
        ORDER_WAITING: _ClassVar[GetServerStatusRequest.Order]
        ORDER_BYTES: _ClassVar[GetServerStatusRequest.Order]
    ORDER_UNSPECIFIED: GetServerStatusRequest.Order
    ORDER_NAME: GetServerStatusRequest.Order
    ORDER_RATE: GetServerStatusRequest.Order
    ORDER_WAITING: GetServerStatusRequest.Order
    ORDER_BYTES: GetServerStatusRequest.Order
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_CONTAINS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MAX_ACCUMULATORS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_PAST_RUNS_FIELD_NUMBER: _ClassVar[int]
    container: str
    name_contains: str
    order: GetServerStatusRequest.Order
    max_accumulators: int
    max_rounds: int
    max_workers: int
    request_id: _accumulator_pb2.RequestId
    max_past_runs: int
    def __init__(self, container: _Optional[str] = ..., name_contains: _Optional[str] = ..., order: _Optional[_Union[GetServerStatusRequest.Order, str]] = ..., max_accumulators: _Optional[int] = ..., max_rounds: _Optional[int] = ..., max_workers: _Optional[int] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., max_past_runs: _Optional[int] = ...) -> None: ...

class GetServerStatusResponse(_message.Message):
    __slots__ = ("version", "incarnation", "uptime", "device", "ops_prepared", "num_accumulators", "accumulators", "workers", "traffic", "memory", "layers", "methods", "errors", "totals", "num_layers", "parameters", "num_parameters", "update_totals", "requests", "past_runs")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    OPS_PREPARED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCUMULATORS_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATORS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TOTALS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAST_RUNS_FIELD_NUMBER: _ClassVar[int]
    version: str
    incarnation: str
    uptime: float
    device: str
    ops_prepared: bool
    num_accumulators: int
    accumulators: _containers.RepeatedCompositeFieldContainer[AccumulatorStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    traffic: _containers.RepeatedCompositeFieldContainer[TrafficStatus]
    memory: _containers.RepeatedCompositeFieldContainer[MemoryStatus]
    layers: _containers.RepeatedCompositeFieldContainer[LayerStatus]
    methods: _containers.RepeatedCompositeFieldContainer[MethodStatus]
    errors: _containers.RepeatedCompositeFieldContainer[ErrorStatus]
    totals: GradientTotals
    num_layers: int
    parameters: _containers.RepeatedCompositeFieldContainer[ParametersStatus]
    num_parameters: int
    update_totals: GradientTotals
    requests: _containers.RepeatedCompositeFieldContainer[RequestStatus]
    past_runs: _containers.RepeatedCompositeFieldContainer[PastRun]
    def __init__(self, version: _Optional[str] = ..., incarnation: _Optional[str] = ..., uptime: _Optional[float] = ..., device: _Optional[str] = ..., ops_prepared: bool = ..., num_accumulators: _Optional[int] = ..., accumulators: _Optional[_Iterable[_Union[AccumulatorStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., traffic: _Optional[_Iterable[_Union[TrafficStatus, _Mapping]]] = ..., memory: _Optional[_Iterable[_Union[MemoryStatus, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[LayerStatus, _Mapping]]] = ..., methods: _Optional[_Iterable[_Union[MethodStatus, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[ErrorStatus, _Mapping]]] = ..., totals: _Optional[_Union[GradientTotals, _Mapping]] = ..., num_layers: _Optional[int] = ..., parameters: _Optional[_Iterable[_Union[ParametersStatus, _Mapping]]] = ..., num_parameters: _Optional[int] = ..., update_totals: _Optional[_Union[GradientTotals, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[RequestStatus, _Mapping]]] = ..., past_runs: _Optional[_Iterable[_Union[PastRun, _Mapping]]] = ...) -> None: ...

class PastRun(_message.Message):
    __slots__ = ("kind", "container", "name", "incarnation", "begun", "ended", "step", "metrics", "reason")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    container: str
    name: str
    incarnation: str
    begun: float
    ended: float
    step: int
    metrics: _containers.ScalarMap[str, float]
    reason: str
    def __init__(self, kind: _Optional[str] = ..., container: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., begun: _Optional[float] = ..., ended: _Optional[float] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., reason: _Optional[str] = ...) -> None: ...

class RequestStatus(_message.Message):
    __slots__ = ("container", "name", "kind", "outcome", "step")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    container: str
    name: str
    kind: str
    outcome: str
    step: int
    def __init__(self, container: _Optional[str] = ..., name: _Optional[str] = ..., kind: _Optional[str] = ..., outcome: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class AccumulatorStatus(_message.Message):
    __slots__ = ("container", "name", "global_step", "num_rounds", "rounds_per_second", "num_accumulated", "num_required", "num_waiting", "num_bytes", "accepted", "stale", "duplicate", "refused", "median_round_seconds", "workers", "missing", "rounds", "different", "num_compared", "compared_step", "different_since")
    class DifferentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DifferentSinceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCUMULATED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPARED_FIELD_NUMBER: _ClassVar[int]
    COMPARED_STEP_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_SINCE_FIELD_NUMBER: _ClassVar[int]
    container: str
    name: str
    global_step: int
    num_rounds: int
    rounds_per_second: float
    num_accumulated: int
    num_required: int
    num_waiting: int
    num_bytes: int
    accepted: int
    stale: int
    duplicate: int
    refused: int
    median_round_seconds: float
    workers: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedScalarFieldContainer[str]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundStatus]
    different: _containers.ScalarMap[str, int]
    num_compared: int
    compared_step: int
    different_since: _containers.ScalarMap[str, int]
    def __init__(self, container: _Optional[str] = ..., name: _Optional[str] = ..., global_step: _Optional[int] = ..., num_rounds: _Optional[int] = ..., rounds_per_second: _Optional[float] = ..., num_accumulated: _Optional[int] = ..., num_required: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_bytes: _Optional[int] = ..., accepted: _Optional[int] = ..., stale: _Optional[int] = ..., duplicate: _Optional[int] = ..., refused: _Optional[int] = ..., median_round_seconds: _Optional[float] = ..., workers: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[str]] = ..., rounds: _Optional[_Iterable[_Union[RoundStatus, _Mapping]]] = ..., different: _Optional[_Mapping[str, int]] = ..., num_compared: _Optional[int] = ..., compared_step: _Optional[int] = ..., different_since: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ParametersStatus(_message.Message):
    __slots__ = ("container", "name", "step", "num_rounds", "rounds_per_second", "num_updates", "num_required", "num_waiting", "num_bytes", "accepted", "stale", "duplicate", "refused", "median_round_seconds", "workers", "missing", "rounds", "gone", "optimizer", "learning_rate", "rules", "weights", "num_counted", "num_live", "num_ended", "evaluations")
    class NumEndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_COUNTED_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    container: str
    name: str
    step: int
    num_rounds: int
    rounds_per_second: float
    num_updates: int
    num_required: int
    num_waiting: int
    num_bytes: int
    accepted: int
    stale: int
    duplicate: int
    refused: int
    median_round_seconds: float
    workers: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedScalarFieldContainer[str]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundStatus]
    gone: _containers.RepeatedScalarFieldContainer[str]
    optimizer: str
    learning_rate: float
    rules: str
    weights: WeightStatus
    num_counted: int
    num_live: int
    num_ended: _containers.ScalarMap[str, int]
    evaluations: _containers.RepeatedCompositeFieldContainer[EvaluationStatus]
    def __init__(self, container: _Optional[str] = ..., name: _Optional[str] = ..., step: _Optional[int] = ..., num_rounds: _Optional[int] = ..., rounds_per_second: _Optional[float] = ..., num_updates: _Optional[int] = ..., num_required: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_bytes: _Optional[int] = ..., accepted: _Optional[int] = ..., stale: _Optional[int] = ..., duplicate: _Optional[int] = ..., refused: _Optional[int] = ..., median_round_seconds: _Optional[float] = ..., workers: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[str]] = ..., rounds: _Optional[_Iterable[_Union[RoundStatus, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ..., optimizer: _Optional[str] = ..., learning_rate: _Optional[float] = ..., rules: _Optional[str] = ..., weights: _Optional[_Union[WeightStatus, _Mapping]] = ..., num_counted: _Optional[int] = ..., num_live: _Optional[int] = ..., num_ended: _Optional[_Mapping[str, int]] = ..., evaluations: _Optional[_Iterable[_Union[EvaluationStatus, _Mapping]]] = ...) -> None: ...

class EvaluationStatus(_message.Message):
    __slots__ = ("step", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WeightStatus(_message.Message):
    __slots__ = ("accepted", "applied", "pending", "dropped", "refused")
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
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    accepted: float
    applied: float
    pending: float
    dropped: float
    refused: _containers.ScalarMap[str, float]
    def __init__(self, accepted: _Optional[float] = ..., applied: _Optional[float] = ..., pending: _Optional[float] = ..., dropped: _Optional[float] = ..., refused: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RoundStatus(_message.Message):
    __slots__ = ("step", "began", "ended", "num_required", "arrivals", "missing", "reason", "apply_seconds", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    began: float
    ended: float
    num_required: int
    arrivals: _containers.RepeatedCompositeFieldContainer[ArrivalStatus]
    missing: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    apply_seconds: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., began: _Optional[float] = ..., ended: _Optional[float] = ..., num_required: _Optional[int] = ..., arrivals: _Optional[_Iterable[_Union[ArrivalStatus, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., apply_seconds: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ArrivalStatus(_message.Message):
    __slots__ = ("worker_id", "after", "stale", "staleness")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    after: float
    stale: bool
    staleness: int
    def __init__(self, worker_id: _Optional[str] = ..., after: _Optional[float] = ..., stale: bool = ..., staleness: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "rounds", "mean_lateness", "times_last", "waited_for", "stale", "missed", "last_seen")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MEAN_LATENESS_FIELD_NUMBER: _ClassVar[int]
    TIMES_LAST_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rounds: int
    mean_lateness: float
    times_last: int
    waited_for: float
    stale: int
    missed: int
    last_seen: float
    def __init__(self, worker_id: _Optional[str] = ..., rounds: _Optional[int] = ..., mean_lateness: _Optional[float] = ..., times_last: _Optional[int] = ..., waited_for: _Optional[float] = ..., stale: _Optional[int] = ..., missed: _Optional[int] = ..., last_seen: _Optional[float] = ...) -> None: ...

class TrafficStatus(_message.Message):
    __slots__ = ("way", "received_bytes", "sent_bytes", "calls")
    WAY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    way: str
    received_bytes: int
    sent_bytes: int
    calls: int
    def __init__(self, way: _Optional[str] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., calls: _Optional[int] = ...) -> None: ...

class MemoryStatus(_message.Message):
    __slots__ = ("purpose", "num_bytes", "max_bytes")
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    purpose: str
    num_bytes: int
    max_bytes: int
    def __init__(self, purpose: _Optional[str] = ..., num_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class LayerStatus(_message.Message):
    __slots__ = ("container", "name", "num_forwards", "num_bytes")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    container: str
    name: str
    num_forwards: int
    num_bytes: int
    def __init__(self, container: _Optional[str] = ..., name: _Optional[str] = ..., num_forwards: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class MethodStatus(_message.Message):
    __slots__ = ("service", "method", "started", "in_progress", "handled", "working_seconds", "waiting_seconds")
    class HandledEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    IN_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    WORKING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    service: str
    method: str
    started: int
    in_progress: int
    handled: _containers.ScalarMap[str, int]
    working_seconds: float
    waiting_seconds: float
    def __init__(self, service: _Optional[str] = ..., method: _Optional[str] = ..., started: _Optional[int] = ..., in_progress: _Optional[int] = ..., handled: _Optional[_Mapping[str, int]] = ..., working_seconds: _Optional[float] = ..., waiting_seconds: _Optional[float] = ...) -> None: ...

class ErrorStatus(_message.Message):
    __slots__ = ("method", "code", "message", "count", "at")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    method: str
    code: str
    message: str
    count: int
    at: float
    def __init__(self, method: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., count: _Optional[int] = ..., at: _Optional[float] = ...) -> None: ...

class GradientTotals(_message.Message):
    __slots__ = ("accepted", "stale", "duplicate", "refused", "accepted_bytes", "rounds")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    stale: int
    duplicate: int
    refused: int
    accepted_bytes: int
    rounds: int
    def __init__(self, accepted: _Optional[int] = ..., stale: _Optional[int] = ..., duplicate: _Optional[int] = ..., refused: _Optional[int] = ..., accepted_bytes: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class GetLogRequest(_message.Message):
    __slots__ = ("max_lines", "level", "contains", "after")
    MAX_LINES_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    max_lines: int
    level: str
    contains: str
    after: int
    def __init__(self, max_lines: _Optional[int] = ..., level: _Optional[str] = ..., contains: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class GetLogResponse(_message.Message):
    __slots__ = ("lines", "incarnation")
    LINES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    incarnation: str
    def __init__(self, lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("number", "time", "level", "logger", "message", "request_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    level: str
    logger: str
    message: str
    request_id: str
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., level: _Optional[str] = ..., logger: _Optional[str] = ..., message: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...
