"""What ops return, with the names that TensorFlow gives their outputs.

Each field is a NumPy array, or a TensorHandle where the call was told to keep its outputs on the server.
"""

from typing import Any, NamedTuple


class FusedBatchNormOutputs(NamedTuple):
    """Outputs of FusedBatchNorm and FusedBatchNormV2; see `RawOps.FusedBatchNormV3`."""

    y: Any
    batch_mean: Any
    batch_variance: Any
    reserve_space_1: Any
    reserve_space_2: Any


class FusedBatchNormV3Outputs(NamedTuple):
    """Outputs of FusedBatchNormV3; see `RawOps.FusedBatchNormV3`."""

    y: Any
    batch_mean: Any
    batch_variance: Any
    reserve_space_1: Any
    reserve_space_2: Any
    reserve_space_3: Any


class FusedBatchNormGradOutputs(NamedTuple):
    """Outputs of FusedBatchNormGrad and FusedBatchNormGradV2; see `RawOps.FusedBatchNormGradV3`."""

    x_backprop: Any
    scale_backprop: Any
    offset_backprop: Any
    reserve_space_3: Any
    reserve_space_4: Any


class FusedBatchNormGradV3Outputs(NamedTuple):
    """Outputs of FusedBatchNormGradV3; see `RawOps.FusedBatchNormGradV3`."""

    x_backprop: Any
    scale_backprop: Any
    offset_backprop: Any
    reserve_space_4: Any
    reserve_space_5: Any


class GRUBlockCellOutputs(NamedTuple):
    """Outputs of GRUBlockCell; see `RawOps.GRUBlockCell`."""

    r: Any
    u: Any
    c: Any
    h: Any


class GRUBlockCellGradOutputs(NamedTuple):
    """Outputs of GRUBlockCellGrad, as TensorFlow has them; see `RawOps.GRUBlockCellGrad`."""

    d_x: Any
    d_h_prev: Any
    d_c_bar: Any
    d_r_bar_u_bar: Any


class GRUBlockCellAllGradOutputs(NamedTuple):
    """Outputs of GRUBlockCellGrad with `weight_gradients`; see `RawOps.GRUBlockCellGrad`."""

    d_x: Any
    d_h_prev: Any
    d_c_bar: Any
    d_r_bar_u_bar: Any
    d_w_ru: Any
    d_w_c: Any
    d_b_ru: Any
    d_b_c: Any


class CudnnRNNOutputs(NamedTuple):
    """Outputs of CudnnRNN; see `RawOps.CudnnRNNV3`."""

    output: Any
    output_h: Any
    output_c: Any
    reserve_space: Any


class CudnnRNNV3Outputs(NamedTuple):
    """Outputs of CudnnRNNV2 and CudnnRNNV3; see `RawOps.CudnnRNNV3`."""

    output: Any
    output_h: Any
    output_c: Any
    reserve_space: Any
    host_reserved: Any


class CudnnRNNBackpropOutputs(NamedTuple):
    """Outputs of CudnnRNNBackprop in all versions; see `RawOps.CudnnRNNBackpropV3`."""

    input_backprop: Any
    input_h_backprop: Any
    input_c_backprop: Any
    params_backprop: Any


class CudnnRNNParamsToCanonicalOutputs(NamedTuple):
    """Outputs of CudnnRNNParamsToCanonical and V2: lists; see `RawOps.CudnnRNNParamsToCanonicalV2`."""

    weights: Any
    biases: Any


class SparseAccumulatorTakeGradientOutputs(NamedTuple):
    """Outputs of SparseAccumulatorTakeGradient; see `RawOps.SparseAccumulatorTakeGradient`."""

    indices: Any
    values: Any
    shape: Any
