"""Average the gradients of many workers, and compute gradient ops, on a gradserve server.

import gradserve

with gradserve.connect("localhost:50051") as client:
    acc = client.conditional_accumulator("float32", shape=(3,), shared_name="w")
    acc.apply_grad([1.0, 2.0, 3.0], local_step=0)
    mean = acc.take_grad(1)
"""

from gradserve import codecs as codecs
from gradserve import optim as optim
from gradserve import reductions as reductions
from gradserve.accumulators import (
    Accumulator,
    ConditionalAccumulator,
    GradientAccumulator,
    SparseConditionalAccumulator,
)
from gradserve.batch_norm import (
    BatchNormForward,
    BatchNormGradients,
    BatchNormImplementation,
    BatchNormLayerInfo,
    IgnoredArgument,
    IgnoredArgumentWarning,
    Initializer,
    RandomAdjustment,
    Regularizer,
    VariableInfo,
)
from gradserve.batch_norm_layer import BatchNormLayer
from gradserve.calls.raw_ops.accumulator_arguments import AccumulatorLike
from gradserve.client import Client, connect
from gradserve.conversion.trees import Tree
from gradserve.errors import (
    AbortedError,
    AlreadyExistsError,
    CallCancelledError,
    DeadlineExceededError,
    ForkedClientError,
    GradserveError,
    InternalError,
    InvalidArgumentError,
    LostError,
    NotDurableError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    StaleGradientError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from gradserve.interceptors import Around, CallAnswer, CallInfo, Interceptor
from gradserve.ops.normalization import (
    FusedBatchNormGradOutputs,
    FusedBatchNormGradV3Outputs,
    FusedBatchNormOutputs,
    FusedBatchNormV3Outputs,
    LayerNormGradOutputs,
    LayerNormOutputs,
)
from gradserve.ops.recurrent import (
    CudnnRNNBackpropOutputs,
    CudnnRNNOutputs,
    CudnnRNNParamsToCanonicalOutputs,
    CudnnRNNV3Outputs,
    GRUBlockCellAllGradOutputs,
    GRUBlockCellGradOutputs,
    GRUBlockCellOutputs,
)
from gradserve.parameter_records import (
    UNCHANGED,
    Evaluation,
    ParametersInfo,
    PushPull,
    PushResult,
    Refusal,
    ReportResult,
    RoundRecord,
    RoundRules,
    RoundUpdate,
    Unchanged,
    Version,
    WeightLedger,
)
from gradserve.parameters import Parameters
from gradserve.public_names import publish as _publish
from gradserve.raw_ops import RawOps
from gradserve.results import (
    ACCEPTED,
    STALE,
    AccumulatorHandle,
    AccumulatorInfo,
    AccumulatorKind,
    ApplyResult,
    ArrayLike,
    Average,
    DenseSpec,
    Device,
    DifferentWorker,
    DTypeLike,
    IndexedSlices,
    Outcome,
    PushPullResult,
    ServerInfo,
    Shape,
    SparseAccumulatorTakeGradientOutputs,
    SparseSpec,
    Tensor,
    TensorHandle,
    TensorLike,
    TransportInfo,
)
from gradserve.saved.parameters import SavedParameters, load_parameters
from gradserve_protocol.server_status import ServerStatus
from gradserve_protocol.tls import TLS

__version__ = "0.1.0"

__all__ = [
    "ACCEPTED",
    "STALE",
    "TLS",
    "UNCHANGED",
    "AbortedError",
    "Accumulator",
    "AccumulatorHandle",
    "AccumulatorInfo",
    "AccumulatorKind",
    "AccumulatorLike",
    "AlreadyExistsError",
    "ApplyResult",
    "Around",
    "ArrayLike",
    "Average",
    "BatchNormForward",
    "BatchNormGradients",
    "BatchNormImplementation",
    "BatchNormLayer",
    "BatchNormLayerInfo",
    "CallAnswer",
    "CallCancelledError",
    "CallInfo",
    "Client",
    "ConditionalAccumulator",
    "CudnnRNNBackpropOutputs",
    "CudnnRNNOutputs",
    "CudnnRNNParamsToCanonicalOutputs",
    "CudnnRNNV3Outputs",
    "DTypeLike",
    "DeadlineExceededError",
    "DenseSpec",
    "Device",
    "DifferentWorker",
    "Evaluation",
    "ForkedClientError",
    "FusedBatchNormGradOutputs",
    "FusedBatchNormGradV3Outputs",
    "FusedBatchNormOutputs",
    "FusedBatchNormV3Outputs",
    "GRUBlockCellAllGradOutputs",
    "GRUBlockCellGradOutputs",
    "GRUBlockCellOutputs",
    "GradientAccumulator",
    "GradserveError",
    "IgnoredArgument",
    "IgnoredArgumentWarning",
    "IndexedSlices",
    "Initializer",
    "Interceptor",
    "InternalError",
    "InvalidArgumentError",
    "LayerNormGradOutputs",
    "LayerNormOutputs",
    "LostError",
    "NotDurableError",
    "NotFoundError",
    "OutOfRangeError",
    "Outcome",
    "Parameters",
    "ParametersInfo",
    "PermissionDeniedError",
    "PushPull",
    "PushPullResult",
    "PushResult",
    "RandomAdjustment",
    "RawOps",
    "Refusal",
    "Regularizer",
    "ReportResult",
    "ResourceExhaustedError",
    "RoundRecord",
    "RoundRules",
    "RoundUpdate",
    "SavedParameters",
    "ServerInfo",
    "ServerStatus",
    "Shape",
    "SparseAccumulatorTakeGradientOutputs",
    "SparseConditionalAccumulator",
    "SparseSpec",
    "StaleGradientError",
    "Tensor",
    "TensorHandle",
    "TensorLike",
    "TransportInfo",
    "Tree",
    "UnauthenticatedError",
    "UnavailableError",
    "Unchanged",
    "UnimplementedError",
    "VariableInfo",
    "Version",
    "WeightLedger",
    "connect",
    "load_parameters",
]

_publish(__name__, globals(), __all__)
