import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from gradserve_protocol.v1 import accumulator_pb2 as _accumulator_pb2
from gradserve_protocol.v1 import codecs_pb2 as _codecs_pb2
from gradserve_protocol.v1 import lease_pb2 as _lease_pb2
from gradserve_protocol.v1 import parameters_pb2 as _parameters_pb2
from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateParametersRequest(_message.Message):
    __slots__ = ("parameters", "spec", "lifetime", "values", "release_handles", "step", "state", "creator", "home_incarnation", "sharded")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATOR_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHARDED_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    spec: _parameters_pb2.ParametersSpec
    lifetime: _lease_pb2.Lifetime
    values: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    release_handles: bool
    step: int
    state: _parameters_pb2.OptimizerState
    creator: str
    home_incarnation: str
    sharded: bool
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., spec: _Optional[_Union[_parameters_pb2.ParametersSpec, _Mapping]] = ..., lifetime: _Optional[_Union[_lease_pb2.Lifetime, _Mapping]] = ..., values: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., release_handles: bool = ..., step: _Optional[int] = ..., state: _Optional[_Union[_parameters_pb2.OptimizerState, _Mapping]] = ..., creator: _Optional[str] = ..., home_incarnation: _Optional[str] = ..., sharded: bool = ...) -> None: ...

class CreateParametersResponse(_message.Message):
    __slots__ = ("info", "created", "home_incarnation")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    info: _parameters_pb2.ParametersInfo
    created: bool
    home_incarnation: str
    def __init__(self, info: _Optional[_Union[_parameters_pb2.ParametersInfo, _Mapping]] = ..., created: bool = ..., home_incarnation: _Optional[str] = ...) -> None: ...

class GetParametersRequest(_message.Message):
    __slots__ = ("parameters",)
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ...) -> None: ...

class GetParametersResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _parameters_pb2.ParametersInfo
    def __init__(self, info: _Optional[_Union[_parameters_pb2.ParametersInfo, _Mapping]] = ...) -> None: ...

class ListParametersRequest(_message.Message):
    __slots__ = ("container", "page_size", "page_token")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    container: str
    page_size: int
    page_token: str
    def __init__(self, container: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListParametersResponse(_message.Message):
    __slots__ = ("parameters", "next_page_token")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parameters: _containers.RepeatedCompositeFieldContainer[_parameters_pb2.ParametersInfo]
    next_page_token: str
    def __init__(self, parameters: _Optional[_Iterable[_Union[_parameters_pb2.ParametersInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteParametersRequest(_message.Message):
    __slots__ = ("parameters", "home_incarnation")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    home_incarnation: str
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., home_incarnation: _Optional[str] = ...) -> None: ...

class DeleteParametersResponse(_message.Message):
    __slots__ = ("deleted", "home_incarnation")
    DELETED_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    home_incarnation: str
    def __init__(self, deleted: bool = ..., home_incarnation: _Optional[str] = ...) -> None: ...

class ReadParametersRequest(_message.Message):
    __slots__ = ("parameters", "step", "placement", "timeout", "with_state", "without_values", "decided", "request_id", "state_optimizer", "codec")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_VALUES_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    step: int
    placement: _tensor_pb2.Placement
    timeout: _duration_pb2.Duration
    with_state: bool
    without_values: bool
    decided: _containers.RepeatedCompositeFieldContainer[_parameters_pb2.DecidedRound]
    request_id: _accumulator_pb2.RequestId
    state_optimizer: _parameters_pb2.Optimizer
    codec: _codecs_pb2.Codec
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., step: _Optional[int] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., with_state: bool = ..., without_values: bool = ..., decided: _Optional[_Iterable[_Union[_parameters_pb2.DecidedRound, _Mapping]]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., state_optimizer: _Optional[_Union[_parameters_pb2.Optimizer, _Mapping]] = ..., codec: _Optional[_Union[_codecs_pb2.Codec, str]] = ...) -> None: ...

class ReadParametersResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _parameters_pb2.Version
    def __init__(self, version: _Optional[_Union[_parameters_pb2.Version, _Mapping]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("parameters", "request_id", "local_step", "update", "weight", "worker_id", "release_handles", "accepted_before", "unread_contents", "sum_of", "epoch", "metrics", "measured")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CONTENTS_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    request_id: _accumulator_pb2.RequestId
    local_step: int
    update: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    weight: float
    worker_id: str
    release_handles: bool
    accepted_before: bool
    unread_contents: bool
    sum_of: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.Summand]
    epoch: int
    metrics: _containers.ScalarMap[str, float]
    measured: _containers.RepeatedCompositeFieldContainer[_parameters_pb2.Measurement]
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., local_step: _Optional[int] = ..., update: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., weight: _Optional[float] = ..., worker_id: _Optional[str] = ..., release_handles: bool = ..., accepted_before: bool = ..., unread_contents: bool = ..., sum_of: _Optional[_Iterable[_Union[_accumulator_pb2.Summand, _Mapping]]] = ..., epoch: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., measured: _Optional[_Iterable[_Union[_parameters_pb2.Measurement, _Mapping]]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("outcome", "duplicate", "step", "num_updates", "staleness", "weight", "round", "num_rounds")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    outcome: _accumulator_pb2.ApplyOutcome
    duplicate: bool
    step: int
    num_updates: int
    staleness: int
    weight: float
    round: int
    num_rounds: int
    def __init__(self, outcome: _Optional[_Union[_accumulator_pb2.ApplyOutcome, str]] = ..., duplicate: bool = ..., step: _Optional[int] = ..., num_updates: _Optional[int] = ..., staleness: _Optional[int] = ..., weight: _Optional[float] = ..., round: _Optional[int] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class PushPullParametersRequest(_message.Message):
    __slots__ = ("parameters", "request_id", "local_step", "update", "weight", "worker_id", "release_handles", "unread_contents", "placement", "timeout", "sum_of", "without_values", "epoch", "metrics", "codec", "measured")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CONTENTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_VALUES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    request_id: _accumulator_pb2.RequestId
    local_step: int
    update: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    weight: float
    worker_id: str
    release_handles: bool
    unread_contents: bool
    placement: _tensor_pb2.Placement
    timeout: _duration_pb2.Duration
    sum_of: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.Summand]
    without_values: bool
    epoch: int
    metrics: _containers.ScalarMap[str, float]
    codec: _codecs_pb2.Codec
    measured: _containers.RepeatedCompositeFieldContainer[_parameters_pb2.Measurement]
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., local_step: _Optional[int] = ..., update: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., weight: _Optional[float] = ..., worker_id: _Optional[str] = ..., release_handles: bool = ..., unread_contents: bool = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sum_of: _Optional[_Iterable[_Union[_accumulator_pb2.Summand, _Mapping]]] = ..., without_values: bool = ..., epoch: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., codec: _Optional[_Union[_codecs_pb2.Codec, str]] = ..., measured: _Optional[_Iterable[_Union[_parameters_pb2.Measurement, _Mapping]]] = ...) -> None: ...

class PushPullParametersResponse(_message.Message):
    __slots__ = ("outcome", "duplicate", "version", "staleness", "weight")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    outcome: _accumulator_pb2.ApplyOutcome
    duplicate: bool
    version: _parameters_pb2.Version
    staleness: int
    weight: float
    def __init__(self, outcome: _Optional[_Union[_accumulator_pb2.ApplyOutcome, str]] = ..., duplicate: bool = ..., version: _Optional[_Union[_parameters_pb2.Version, _Mapping]] = ..., staleness: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...

class ChangeParametersRequest(_message.Message):
    __slots__ = ("parameters", "optimizer", "schedule", "rounds", "values", "step", "state", "release_handles", "request_id")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    optimizer: _parameters_pb2.Optimizer
    schedule: _parameters_pb2.Schedule
    rounds: _parameters_pb2.RoundRules
    values: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    step: int
    state: _parameters_pb2.OptimizerState
    release_handles: bool
    request_id: _accumulator_pb2.RequestId
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., optimizer: _Optional[_Union[_parameters_pb2.Optimizer, _Mapping]] = ..., schedule: _Optional[_Union[_parameters_pb2.Schedule, _Mapping]] = ..., rounds: _Optional[_Union[_parameters_pb2.RoundRules, _Mapping]] = ..., values: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., step: _Optional[int] = ..., state: _Optional[_Union[_parameters_pb2.OptimizerState, _Mapping]] = ..., release_handles: bool = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ...) -> None: ...

class ChangeParametersResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _parameters_pb2.ParametersInfo
    def __init__(self, info: _Optional[_Union[_parameters_pb2.ParametersInfo, _Mapping]] = ...) -> None: ...

class ListRoundsRequest(_message.Message):
    __slots__ = ("parameters", "since", "page_size")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    since: int
    page_size: int
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., since: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListRoundsResponse(_message.Message):
    __slots__ = ("rounds", "has_more")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[_parameters_pb2.RoundRecord]
    has_more: bool
    def __init__(self, rounds: _Optional[_Iterable[_Union[_parameters_pb2.RoundRecord, _Mapping]]] = ..., has_more: bool = ...) -> None: ...

class ReportEvaluationRequest(_message.Message):
    __slots__ = ("parameters", "request_id", "step", "metrics", "weight", "worker_id")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    request_id: _accumulator_pb2.RequestId
    step: int
    metrics: _containers.ScalarMap[str, float]
    weight: float
    worker_id: str
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., weight: _Optional[float] = ..., worker_id: _Optional[str] = ...) -> None: ...

class ReportEvaluationResponse(_message.Message):
    __slots__ = ("outcome", "duplicate", "evaluation")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    outcome: _accumulator_pb2.ApplyOutcome
    duplicate: bool
    evaluation: _parameters_pb2.Evaluation
    def __init__(self, outcome: _Optional[_Union[_accumulator_pb2.ApplyOutcome, str]] = ..., duplicate: bool = ..., evaluation: _Optional[_Union[_parameters_pb2.Evaluation, _Mapping]] = ...) -> None: ...

class ListEvaluationsRequest(_message.Message):
    __slots__ = ("parameters", "since", "page_size")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    since: int
    page_size: int
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., since: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListEvaluationsResponse(_message.Message):
    __slots__ = ("evaluations", "has_more")
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    evaluations: _containers.RepeatedCompositeFieldContainer[_parameters_pb2.Evaluation]
    has_more: bool
    def __init__(self, evaluations: _Optional[_Iterable[_Union[_parameters_pb2.Evaluation, _Mapping]]] = ..., has_more: bool = ...) -> None: ...

class ForkParametersRequest(_message.Message):
    __slots__ = ("parameters", "step", "fork", "lifetime")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    step: int
    fork: _parameters_pb2.ParametersRef
    lifetime: _lease_pb2.Lifetime
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., step: _Optional[int] = ..., fork: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., lifetime: _Optional[_Union[_lease_pb2.Lifetime, _Mapping]] = ...) -> None: ...

class ForkParametersResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _parameters_pb2.ParametersInfo
    def __init__(self, info: _Optional[_Union[_parameters_pb2.ParametersInfo, _Mapping]] = ...) -> None: ...

class StageUpdateRequest(_message.Message):
    __slots__ = ("parameters", "request_id", "local_step", "update", "release_handles", "epoch", "withdrawn", "is_wide")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    IS_WIDE_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    request_id: _accumulator_pb2.RequestId
    local_step: int
    update: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    release_handles: bool
    epoch: int
    withdrawn: _containers.RepeatedScalarFieldContainer[int]
    is_wide: bool
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., local_step: _Optional[int] = ..., update: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., release_handles: bool = ..., epoch: _Optional[int] = ..., withdrawn: _Optional[_Iterable[int]] = ..., is_wide: bool = ...) -> None: ...

class StageUpdateResponse(_message.Message):
    __slots__ = ("duplicate", "has_old_updates", "measured")
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    HAS_OLD_UPDATES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    has_old_updates: bool
    measured: _parameters_pb2.Measurement
    def __init__(self, duplicate: bool = ..., has_old_updates: bool = ..., measured: _Optional[_Union[_parameters_pb2.Measurement, _Mapping]] = ...) -> None: ...

class CountUpdatesRequest(_message.Message):
    __slots__ = ("parameters",)
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ...) -> None: ...

class CountUpdatesResponse(_message.Message):
    __slots__ = ("epoch", "part_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    part_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., part_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ForgetUpdatesRequest(_message.Message):
    __slots__ = ("parameters", "epoch", "part_ids")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    parameters: _parameters_pb2.ParametersRef
    epoch: int
    part_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, parameters: _Optional[_Union[_parameters_pb2.ParametersRef, _Mapping]] = ..., epoch: _Optional[int] = ..., part_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ForgetUpdatesResponse(_message.Message):
    __slots__ = ("num_forgotten",)
    NUM_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    num_forgotten: int
    def __init__(self, num_forgotten: _Optional[int] = ...) -> None: ...
