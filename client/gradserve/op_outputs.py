"""What ops return, with the names that TensorFlow gives their outputs.

Each field is a NumPy array, or a TensorHandle where the call was told to keep its outputs on the server.
"""

from typing import Any, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradserve.abbreviation import abbreviated
from gradserve.results import TensorT_co


@abbreviated
class FusedBatchNormOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNorm and FusedBatchNormV2; see `RawOps.FusedBatchNormV3`."""

    y: TensorT_co
    batch_mean: TensorT_co
    batch_variance: TensorT_co
    reserve_space_1: TensorT_co
    reserve_space_2: TensorT_co


@abbreviated
class FusedBatchNormV3Outputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNormV3; see `RawOps.FusedBatchNormV3`."""

    y: TensorT_co
    batch_mean: TensorT_co
    batch_variance: TensorT_co
    reserve_space_1: TensorT_co
    reserve_space_2: TensorT_co
    reserve_space_3: TensorT_co


@abbreviated
class FusedBatchNormGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNormGrad and FusedBatchNormGradV2; see `RawOps.FusedBatchNormGradV3`."""

    x_backprop: TensorT_co
    scale_backprop: TensorT_co
    offset_backprop: TensorT_co
    reserve_space_3: TensorT_co
    reserve_space_4: TensorT_co


@abbreviated
class FusedBatchNormGradV3Outputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNormGradV3; see `RawOps.FusedBatchNormGradV3`."""

    x_backprop: TensorT_co
    scale_backprop: TensorT_co
    offset_backprop: TensorT_co
    reserve_space_4: TensorT_co
    reserve_space_5: TensorT_co


@abbreviated
class GRUBlockCellOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCell; see `RawOps.GRUBlockCell`."""

    r: TensorT_co
    u: TensorT_co
    c: TensorT_co
    h: TensorT_co


@abbreviated
class GRUBlockCellGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCellGrad, as TensorFlow has them; see `RawOps.GRUBlockCellGrad`."""

    d_x: TensorT_co
    d_h_prev: TensorT_co
    d_c_bar: TensorT_co
    d_r_bar_u_bar: TensorT_co


@abbreviated
class GRUBlockCellAllGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCellGrad with `weight_gradients`; see `RawOps.GRUBlockCellGrad`."""

    d_x: TensorT_co
    d_h_prev: TensorT_co
    d_c_bar: TensorT_co
    d_r_bar_u_bar: TensorT_co
    d_w_ru: TensorT_co
    d_w_c: TensorT_co
    d_b_ru: TensorT_co
    d_b_c: TensorT_co


@abbreviated
class CudnnRNNOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNN; see `RawOps.CudnnRNNV3`."""

    output: TensorT_co
    output_h: TensorT_co
    output_c: TensorT_co
    reserve_space: TensorT_co


@abbreviated
class CudnnRNNV3Outputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNNV2 and CudnnRNNV3; see `RawOps.CudnnRNNV3`."""

    output: TensorT_co
    output_h: TensorT_co
    output_c: TensorT_co
    reserve_space: TensorT_co
    host_reserved: TensorT_co


@abbreviated
class CudnnRNNBackpropOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNNBackprop in all versions; see `RawOps.CudnnRNNBackpropV3`."""

    input_backprop: TensorT_co
    input_h_backprop: TensorT_co
    input_c_backprop: TensorT_co
    params_backprop: TensorT_co


@abbreviated
class CudnnRNNParamsToCanonicalOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNNParamsToCanonical and V2: lists; see `RawOps.CudnnRNNParamsToCanonicalV2`."""

    weights: list[TensorT_co]
    biases: list[TensorT_co]


@abbreviated
class SparseAccumulatorTakeGradientOutputs(NamedTuple):
    """Outputs of SparseAccumulatorTakeGradient; see `RawOps.SparseAccumulatorTakeGradient`."""

    indices: NDArray[np.int64]
    values: NDArray[Any]
    shape: NDArray[np.int64]
