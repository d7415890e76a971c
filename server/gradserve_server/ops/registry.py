"""The served ops, the families that compute them on each kind of device, and the CUDA programs of all families."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.activation.cpu import CpuActivation
from gradserve_server.ops.activation.spec import FAMILY as ACTIVATION_FAMILY
from gradserve_server.ops.batch_norm.cpu import CpuBatchNorm
from gradserve_server.ops.batch_norm.spec import FAMILY as BATCH_NORM_FAMILY
from gradserve_server.ops.batch_norm.spec import FUSED_BATCH_NORM, FUSED_BATCH_NORM_GRAD
from gradserve_server.ops.cudnn_rnn.canonical import (
    CUDNN_RNN_CANONICAL_TO_PARAMS,
    CUDNN_RNN_PARAMS_SIZE,
    CUDNN_RNN_PARAMS_TO_CANONICAL,
    CudnnRnnParams,
)
from gradserve_server.ops.cudnn_rnn.canonical import FAMILY as CUDNN_RNN_PARAMS_FAMILY
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn
from gradserve_server.ops.cudnn_rnn.declaration import CUDNN_RNN, CUDNN_RNN_BACKPROP
from gradserve_server.ops.cudnn_rnn.declaration import FAMILY as CUDNN_RNN_FAMILY
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.gru.cpu import CpuGRU
from gradserve_server.ops.gru.spec import FAMILY as GRU_FAMILY
from gradserve_server.ops.gru.spec import GRU_BLOCK_CELL, GRU_BLOCK_CELL_GRAD
from gradserve_server.ops.layer_norm.cpu import CpuLayerNorm
from gradserve_server.ops.layer_norm.spec import FAMILY as LAYER_NORM_FAMILY
from gradserve_server.ops.layer_norm.spec import LAYER_NORM, LAYER_NORM_GRAD
from gradserve_server.ops.operation import AnyOp, Family
from gradserve_server.tensors.spec import MOST_USUAL_FIRST

if TYPE_CHECKING:
    from gradserve_server.devices.cuda.programs import Program

OPS: Mapping[str, AnyOp] = {
    op.name: op
    for op in (
        FUSED_BATCH_NORM,
        FUSED_BATCH_NORM_GRAD,
        GRU_BLOCK_CELL,
        GRU_BLOCK_CELL_GRAD,
        CUDNN_RNN,
        CUDNN_RNN_BACKPROP,
        CUDNN_RNN_PARAMS_SIZE,
        CUDNN_RNN_CANONICAL_TO_PARAMS,
        CUDNN_RNN_PARAMS_TO_CANONICAL,
        LAYER_NORM,
        LAYER_NORM_GRAD,
    )
}
"""The ops by name, which is the name of their RPC."""


def make_families(device: Device, parallel: ForkJoin) -> Mapping[str, Family]:
    """Returns the families of ops on a device, by name."""
    anywhere: dict[str, Family] = {CUDNN_RNN_PARAMS_FAMILY: CudnnRnnParams(device)}
    reserve_key = ReserveKey()
    if isinstance(device, CpuDevice):
        return anywhere | {
            BATCH_NORM_FAMILY: CpuBatchNorm(device, parallel),
            GRU_FAMILY: CpuGRU(device, parallel),
            CUDNN_RNN_FAMILY: CpuCudnnRnn(device, parallel, reserve_key),
            LAYER_NORM_FAMILY: CpuLayerNorm(device, parallel),
            ACTIVATION_FAMILY: CpuActivation(parallel),
        }
    import cupy

    from gradserve_server.devices.cuda.device import CudaDevice
    from gradserve_server.ops.activation.cuda import CudaActivation
    from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
    from gradserve_server.ops.cudnn_rnn.cuda.family import CudaCudnnRnn
    from gradserve_server.ops.gru.cuda import CudaGRU
    from gradserve_server.ops.layer_norm.cuda import CudaLayerNorm

    assert isinstance(device, CudaDevice)
    return anywhere | {
        BATCH_NORM_FAMILY: CudaBatchNorm(device),
        GRU_FAMILY: CudaGRU(device, cupy),
        CUDNN_RNN_FAMILY: CudaCudnnRnn(device, reserve_key),
        LAYER_NORM_FAMILY: CudaLayerNorm(device),
        ACTIVATION_FAMILY: CudaActivation(device),
    }


def cuda_programs() -> "Iterator[Program]":
    """Yields the CUDA programs of all families, and those for sums. Needs no GPU."""
    from gradserve_server.devices.cuda import reduction as sums
    from gradserve_server.ops.activation import cuda as activation
    from gradserve_server.ops.batch_norm import cuda as batch_norm
    from gradserve_server.ops.cudnn_rnn.cuda.family import tag_program
    from gradserve_server.ops.gru import cuda as gru
    from gradserve_server.ops.layer_norm import cuda as layer_norm

    yield tag_program()
    yield from map(sums.program, sums.KEYS)
    for dtype in MOST_USUAL_FIRST:
        for operation in batch_norm.KERNELS:
            yield batch_norm.program(operation, dtype)
        for family in (gru, layer_norm, activation):
            yield family.program(dtype)
