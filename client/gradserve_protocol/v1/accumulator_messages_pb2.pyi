import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from gradserve_protocol.v1 import accumulator_pb2 as _accumulator_pb2
from gradserve_protocol.v1 import lease_pb2 as _lease_pb2
from gradserve_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateAccumulatorRequest(_message.Message):
    __slots__ = ("accumulator", "spec", "lifetime", "sharded", "home_incarnation")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    SHARDED_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    spec: _accumulator_pb2.AccumulatorSpec
    lifetime: _lease_pb2.Lifetime
    sharded: bool
    home_incarnation: str
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., spec: _Optional[_Union[_accumulator_pb2.AccumulatorSpec, _Mapping]] = ..., lifetime: _Optional[_Union[_lease_pb2.Lifetime, _Mapping]] = ..., sharded: bool = ..., home_incarnation: _Optional[str] = ...) -> None: ...

class CreateAccumulatorResponse(_message.Message):
    __slots__ = ("info", "created")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    info: _accumulator_pb2.AccumulatorInfo
    created: bool
    def __init__(self, info: _Optional[_Union[_accumulator_pb2.AccumulatorInfo, _Mapping]] = ..., created: bool = ...) -> None: ...

class GetAccumulatorRequest(_message.Message):
    __slots__ = ("accumulator",)
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ...) -> None: ...

class GetAccumulatorResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _accumulator_pb2.AccumulatorInfo
    def __init__(self, info: _Optional[_Union[_accumulator_pb2.AccumulatorInfo, _Mapping]] = ...) -> None: ...

class ListAccumulatorsRequest(_message.Message):
    __slots__ = ("container", "page_size", "page_token")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    container: str
    page_size: int
    page_token: str
    def __init__(self, container: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAccumulatorsResponse(_message.Message):
    __slots__ = ("accumulators", "next_page_token")
    ACCUMULATORS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    accumulators: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.AccumulatorInfo]
    next_page_token: str
    def __init__(self, accumulators: _Optional[_Iterable[_Union[_accumulator_pb2.AccumulatorInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteAccumulatorRequest(_message.Message):
    __slots__ = ("accumulator", "home_incarnation")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    home_incarnation: str
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., home_incarnation: _Optional[str] = ...) -> None: ...

class DeleteAccumulatorResponse(_message.Message):
    __slots__ = ("deleted", "home_incarnation")
    DELETED_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    home_incarnation: str
    def __init__(self, deleted: bool = ..., home_incarnation: _Optional[str] = ...) -> None: ...

class ApplyGradientRequest(_message.Message):
    __slots__ = ("accumulator", "request_id", "local_step", "gradient", "weight", "worker_id", "release_handles", "accepted_before", "unread_contents", "sum_of", "epoch", "parameters_digest")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CONTENTS_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    request_id: _accumulator_pb2.RequestId
    local_step: int
    gradient: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    weight: float
    worker_id: str
    release_handles: bool
    accepted_before: bool
    unread_contents: bool
    sum_of: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.Summand]
    epoch: int
    parameters_digest: bytes
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., local_step: _Optional[int] = ..., gradient: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., weight: _Optional[float] = ..., worker_id: _Optional[str] = ..., release_handles: bool = ..., accepted_before: bool = ..., unread_contents: bool = ..., sum_of: _Optional[_Iterable[_Union[_accumulator_pb2.Summand, _Mapping]]] = ..., epoch: _Optional[int] = ..., parameters_digest: _Optional[bytes] = ...) -> None: ...

class ApplyGradientResponse(_message.Message):
    __slots__ = ("outcome", "duplicate", "global_step", "num_accumulated", "round", "num_rounds")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCUMULATED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    outcome: _accumulator_pb2.ApplyOutcome
    duplicate: bool
    global_step: int
    num_accumulated: int
    round: int
    num_rounds: int
    def __init__(self, outcome: _Optional[_Union[_accumulator_pb2.ApplyOutcome, str]] = ..., duplicate: bool = ..., global_step: _Optional[int] = ..., num_accumulated: _Optional[int] = ..., round: _Optional[int] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class TakeGradientRequest(_message.Message):
    __slots__ = ("accumulator", "request_id", "num_required", "placement", "timeout")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    request_id: _accumulator_pb2.RequestId
    num_required: int
    placement: _tensor_pb2.Placement
    timeout: _duration_pb2.Duration
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., num_required: _Optional[int] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TakeGradientResponse(_message.Message):
    __slots__ = ("average", "duplicate")
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    average: _accumulator_pb2.Average
    duplicate: bool
    def __init__(self, average: _Optional[_Union[_accumulator_pb2.Average, _Mapping]] = ..., duplicate: bool = ...) -> None: ...

class ReadAverageRequest(_message.Message):
    __slots__ = ("accumulator", "step", "placement", "timeout", "request_id")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    step: int
    placement: _tensor_pb2.Placement
    timeout: _duration_pb2.Duration
    request_id: _accumulator_pb2.RequestId
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., step: _Optional[int] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ...) -> None: ...

class ReadAverageResponse(_message.Message):
    __slots__ = ("average",)
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    average: _accumulator_pb2.Average
    def __init__(self, average: _Optional[_Union[_accumulator_pb2.Average, _Mapping]] = ...) -> None: ...

class PushPullRequest(_message.Message):
    __slots__ = ("accumulator", "request_id", "local_step", "unread_contents", "gradient", "weight", "worker_id", "release_handles", "num_required", "placement", "timeout", "one_per_worker", "sum_of", "epoch", "parameters_digest")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CONTENTS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ONE_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    request_id: _accumulator_pb2.RequestId
    local_step: int
    unread_contents: bool
    gradient: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    weight: float
    worker_id: str
    release_handles: bool
    num_required: int
    placement: _tensor_pb2.Placement
    timeout: _duration_pb2.Duration
    one_per_worker: bool
    sum_of: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.Summand]
    epoch: int
    parameters_digest: bytes
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., local_step: _Optional[int] = ..., unread_contents: bool = ..., gradient: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., weight: _Optional[float] = ..., worker_id: _Optional[str] = ..., release_handles: bool = ..., num_required: _Optional[int] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., one_per_worker: bool = ..., sum_of: _Optional[_Iterable[_Union[_accumulator_pb2.Summand, _Mapping]]] = ..., epoch: _Optional[int] = ..., parameters_digest: _Optional[bytes] = ...) -> None: ...

class PushPullResponse(_message.Message):
    __slots__ = ("outcome", "duplicate", "average", "global_step")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    outcome: _accumulator_pb2.ApplyOutcome
    duplicate: bool
    average: _accumulator_pb2.Average
    global_step: int
    def __init__(self, outcome: _Optional[_Union[_accumulator_pb2.ApplyOutcome, str]] = ..., duplicate: bool = ..., average: _Optional[_Union[_accumulator_pb2.Average, _Mapping]] = ..., global_step: _Optional[int] = ...) -> None: ...

class GetNumAccumulatedRequest(_message.Message):
    __slots__ = ("accumulator",)
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ...) -> None: ...

class GetNumAccumulatedResponse(_message.Message):
    __slots__ = ("num_accumulated", "epoch", "num_rounds")
    NUM_ACCUMULATED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    num_accumulated: int
    epoch: int
    num_rounds: int
    def __init__(self, num_accumulated: _Optional[int] = ..., epoch: _Optional[int] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class EndEpochRequest(_message.Message):
    __slots__ = ("accumulator",)
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ...) -> None: ...

class EndEpochResponse(_message.Message):
    __slots__ = ("epoch", "part_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    part_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., part_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ForgetGradientsRequest(_message.Message):
    __slots__ = ("accumulator", "home_incarnation", "epoch", "part_ids")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    home_incarnation: str
    epoch: int
    part_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., home_incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., part_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ForgetGradientsResponse(_message.Message):
    __slots__ = ("num_forgotten",)
    NUM_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    num_forgotten: int
    def __init__(self, num_forgotten: _Optional[int] = ...) -> None: ...

class SetGlobalStepRequest(_message.Message):
    __slots__ = ("accumulator", "global_step", "drop_gradients")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    DROP_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    global_step: int
    drop_gradients: bool
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., global_step: _Optional[int] = ..., drop_gradients: bool = ...) -> None: ...

class SetGlobalStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageGradientRequest(_message.Message):
    __slots__ = ("accumulator", "request_id", "home_incarnation", "local_step", "gradient", "release_handles", "weight", "can_stage_again", "is_sum", "epoch", "withdrawn")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HOME_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CAN_STAGE_AGAIN_FIELD_NUMBER: _ClassVar[int]
    IS_SUM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    request_id: _accumulator_pb2.RequestId
    home_incarnation: str
    local_step: int
    gradient: _containers.RepeatedCompositeFieldContainer[_accumulator_pb2.ComponentGradient]
    release_handles: bool
    weight: float
    can_stage_again: bool
    is_sum: bool
    epoch: int
    withdrawn: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., request_id: _Optional[_Union[_accumulator_pb2.RequestId, _Mapping]] = ..., home_incarnation: _Optional[str] = ..., local_step: _Optional[int] = ..., gradient: _Optional[_Iterable[_Union[_accumulator_pb2.ComponentGradient, _Mapping]]] = ..., release_handles: bool = ..., weight: _Optional[float] = ..., can_stage_again: bool = ..., is_sum: bool = ..., epoch: _Optional[int] = ..., withdrawn: _Optional[_Iterable[int]] = ...) -> None: ...

class StageGradientResponse(_message.Message):
    __slots__ = ("duplicate", "has_old_gradients")
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    HAS_OLD_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    has_old_gradients: bool
    def __init__(self, duplicate: bool = ..., has_old_gradients: bool = ...) -> None: ...

class ReduceGradientsRequest(_message.Message):
    __slots__ = ("accumulator", "average", "placement")
    ACCUMULATOR_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    accumulator: _accumulator_pb2.AccumulatorRef
    average: _accumulator_pb2.Average
    placement: _tensor_pb2.Placement
    def __init__(self, accumulator: _Optional[_Union[_accumulator_pb2.AccumulatorRef, _Mapping]] = ..., average: _Optional[_Union[_accumulator_pb2.Average, _Mapping]] = ..., placement: _Optional[_Union[_tensor_pb2.Placement, _Mapping]] = ...) -> None: ...

class ReduceGradientsResponse(_message.Message):
    __slots__ = ("average",)
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    average: _accumulator_pb2.Average
    def __init__(self, average: _Optional[_Union[_accumulator_pb2.Average, _Mapping]] = ...) -> None: ...
