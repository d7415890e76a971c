"""The calls of `Client.raw_ops`, one module for each family of ops."""

from gradserve.calls.raw_ops import docstrings
from gradserve.calls.raw_ops.accumulators import AccumulatorOps
from gradserve.calls.raw_ops.batch_norm import BatchNormCalls
from gradserve.calls.raw_ops.cudnn_rnn import CudnnRnnCalls
from gradserve.calls.raw_ops.cudnn_rnn_params import CudnnRnnParamsCalls
from gradserve.calls.raw_ops.gru import GRUCalls
from gradserve.calls.raw_ops.sparse_accumulators import SparseAccumulatorOps


class RawOpsCalls(AccumulatorOps, SparseAccumulatorOps, BatchNormCalls, GRUCalls, CudnnRnnCalls, CudnnRnnParamsCalls):
    """Calls of `RawOps`."""


docstrings.complete(
    RawOpsCalls,
    {
        "ResourceConditionalAccumulator": "ConditionalAccumulator",
        "SparseConditionalAccumulator": "ConditionalAccumulator",
        "ResourceAccumulatorApplyGradient": "AccumulatorApplyGradient",
        "ResourceAccumulatorTakeGradient": "AccumulatorTakeGradient",
        "SparseAccumulatorTakeGradient": "AccumulatorTakeGradient",
        "ResourceAccumulatorNumAccumulated": "AccumulatorNumAccumulated",
        "ResourceAccumulatorSetGlobalStep": "AccumulatorSetGlobalStep",
        "FusedBatchNorm": "FusedBatchNormV3",
        "FusedBatchNormV2": "FusedBatchNormV3",
        "FusedBatchNormGrad": "FusedBatchNormGradV3",
        "FusedBatchNormGradV2": "FusedBatchNormGradV3",
        "CudnnRNN": "CudnnRNNV3",
        "CudnnRNNV2": "CudnnRNNV3",
        "CudnnRNNBackprop": "CudnnRNNBackpropV3",
        "CudnnRNNBackpropV2": "CudnnRNNBackpropV3",
        "CudnnRNNCanonicalToParams": "CudnnRNNCanonicalToParamsV2",
        "CudnnRNNParamsToCanonical": "CudnnRNNParamsToCanonicalV2",
    },
)
