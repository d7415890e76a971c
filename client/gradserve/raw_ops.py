"""Gradient ops and accumulator ops, called from ordinary code. `gradserve.aio` has the same with `await`."""

from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.face import BlockingFace, blocking


class RawOps(BlockingFace[RawOpsCalls]):
    """TensorFlow's ops by their names there, carried out by the server.

    Arguments and defaults are TensorFlow's, and all are keywords. An input is an array, something NumPy makes one
    of, or the TensorHandle of one on the server. Several outputs are a named tuple with TensorFlow's names.
    """

    ConditionalAccumulator = blocking(RawOpsCalls.ConditionalAccumulator)
    ResourceConditionalAccumulator = blocking(RawOpsCalls.ResourceConditionalAccumulator)
    SparseConditionalAccumulator = blocking(RawOpsCalls.SparseConditionalAccumulator)
    AccumulatorApplyGradient = blocking(RawOpsCalls.AccumulatorApplyGradient)
    ResourceAccumulatorApplyGradient = blocking(RawOpsCalls.ResourceAccumulatorApplyGradient)
    SparseAccumulatorApplyGradient = blocking(RawOpsCalls.SparseAccumulatorApplyGradient)
    AccumulatorTakeGradient = blocking(RawOpsCalls.AccumulatorTakeGradient)
    ResourceAccumulatorTakeGradient = blocking(RawOpsCalls.ResourceAccumulatorTakeGradient)
    SparseAccumulatorTakeGradient = blocking(RawOpsCalls.SparseAccumulatorTakeGradient)
    AccumulatorNumAccumulated = blocking(RawOpsCalls.AccumulatorNumAccumulated)
    ResourceAccumulatorNumAccumulated = blocking(RawOpsCalls.ResourceAccumulatorNumAccumulated)
    AccumulatorSetGlobalStep = blocking(RawOpsCalls.AccumulatorSetGlobalStep)
    ResourceAccumulatorSetGlobalStep = blocking(RawOpsCalls.ResourceAccumulatorSetGlobalStep)
    DestroyResourceOp = blocking(RawOpsCalls.DestroyResourceOp)
    FusedBatchNorm = blocking(RawOpsCalls.FusedBatchNorm)
    FusedBatchNormV2 = blocking(RawOpsCalls.FusedBatchNormV2)
    FusedBatchNormV3 = blocking(RawOpsCalls.FusedBatchNormV3)
    FusedBatchNormGrad = blocking(RawOpsCalls.FusedBatchNormGrad)
    FusedBatchNormGradV2 = blocking(RawOpsCalls.FusedBatchNormGradV2)
    FusedBatchNormGradV3 = blocking(RawOpsCalls.FusedBatchNormGradV3)
    GRUBlockCell = blocking(RawOpsCalls.GRUBlockCell)
    GRUBlockCellGrad = blocking(RawOpsCalls.GRUBlockCellGrad)
    CudnnRNN = blocking(RawOpsCalls.CudnnRNN)
    CudnnRNNV2 = blocking(RawOpsCalls.CudnnRNNV2)
    CudnnRNNV3 = blocking(RawOpsCalls.CudnnRNNV3)
    CudnnRNNBackprop = blocking(RawOpsCalls.CudnnRNNBackprop)
    CudnnRNNBackpropV2 = blocking(RawOpsCalls.CudnnRNNBackpropV2)
    CudnnRNNBackpropV3 = blocking(RawOpsCalls.CudnnRNNBackpropV3)
    CudnnRNNParamsSize = blocking(RawOpsCalls.CudnnRNNParamsSize)
    CudnnRNNCanonicalToParams = blocking(RawOpsCalls.CudnnRNNCanonicalToParams)
    CudnnRNNCanonicalToParamsV2 = blocking(RawOpsCalls.CudnnRNNCanonicalToParamsV2)
    CudnnRNNParamsToCanonical = blocking(RawOpsCalls.CudnnRNNParamsToCanonical)
    CudnnRNNParamsToCanonicalV2 = blocking(RawOpsCalls.CudnnRNNParamsToCanonicalV2)
