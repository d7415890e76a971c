"""Gradient ops and accumulator ops, called with `await`."""

from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.face import AsyncFace, awaiting


class RawOps(AsyncFace[RawOpsCalls]):
    """TensorFlow's ops by their names there, carried out by the server.

    Arguments and defaults are TensorFlow's, and all are keywords. An input is an array, something NumPy makes one
    of, or the TensorHandle of one on the server. Several outputs are a named tuple with TensorFlow's names.
    """

    ConditionalAccumulator = awaiting(RawOpsCalls.ConditionalAccumulator)
    ResourceConditionalAccumulator = awaiting(RawOpsCalls.ResourceConditionalAccumulator)
    SparseConditionalAccumulator = awaiting(RawOpsCalls.SparseConditionalAccumulator)
    AccumulatorApplyGradient = awaiting(RawOpsCalls.AccumulatorApplyGradient)
    ResourceAccumulatorApplyGradient = awaiting(RawOpsCalls.ResourceAccumulatorApplyGradient)
    SparseAccumulatorApplyGradient = awaiting(RawOpsCalls.SparseAccumulatorApplyGradient)
    AccumulatorTakeGradient = awaiting(RawOpsCalls.AccumulatorTakeGradient)
    ResourceAccumulatorTakeGradient = awaiting(RawOpsCalls.ResourceAccumulatorTakeGradient)
    SparseAccumulatorTakeGradient = awaiting(RawOpsCalls.SparseAccumulatorTakeGradient)
    AccumulatorNumAccumulated = awaiting(RawOpsCalls.AccumulatorNumAccumulated)
    ResourceAccumulatorNumAccumulated = awaiting(RawOpsCalls.ResourceAccumulatorNumAccumulated)
    AccumulatorSetGlobalStep = awaiting(RawOpsCalls.AccumulatorSetGlobalStep)
    ResourceAccumulatorSetGlobalStep = awaiting(RawOpsCalls.ResourceAccumulatorSetGlobalStep)
    DestroyResourceOp = awaiting(RawOpsCalls.DestroyResourceOp)
    FusedBatchNorm = awaiting(RawOpsCalls.FusedBatchNorm)
    FusedBatchNormV2 = awaiting(RawOpsCalls.FusedBatchNormV2)
    FusedBatchNormV3 = awaiting(RawOpsCalls.FusedBatchNormV3)
    FusedBatchNormGrad = awaiting(RawOpsCalls.FusedBatchNormGrad)
    FusedBatchNormGradV2 = awaiting(RawOpsCalls.FusedBatchNormGradV2)
    FusedBatchNormGradV3 = awaiting(RawOpsCalls.FusedBatchNormGradV3)
    GRUBlockCell = awaiting(RawOpsCalls.GRUBlockCell)
    GRUBlockCellGrad = awaiting(RawOpsCalls.GRUBlockCellGrad)
    CudnnRNN = awaiting(RawOpsCalls.CudnnRNN)
    CudnnRNNV2 = awaiting(RawOpsCalls.CudnnRNNV2)
    CudnnRNNV3 = awaiting(RawOpsCalls.CudnnRNNV3)
    CudnnRNNBackprop = awaiting(RawOpsCalls.CudnnRNNBackprop)
    CudnnRNNBackpropV2 = awaiting(RawOpsCalls.CudnnRNNBackpropV2)
    CudnnRNNBackpropV3 = awaiting(RawOpsCalls.CudnnRNNBackpropV3)
    CudnnRNNParamsSize = awaiting(RawOpsCalls.CudnnRNNParamsSize)
    CudnnRNNCanonicalToParams = awaiting(RawOpsCalls.CudnnRNNCanonicalToParams)
    CudnnRNNCanonicalToParamsV2 = awaiting(RawOpsCalls.CudnnRNNCanonicalToParamsV2)
    CudnnRNNParamsToCanonical = awaiting(RawOpsCalls.CudnnRNNParamsToCanonical)
    CudnnRNNParamsToCanonicalV2 = awaiting(RawOpsCalls.CudnnRNNParamsToCanonicalV2)
