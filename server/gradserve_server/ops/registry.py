"""The families that compute the ops on each kind of device."""

from collections.abc import Mapping

from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.ops.activation.cpu.family import CpuActivation
from gradserve_server.ops.activation.declaration import FAMILY as ACTIVATION
from gradserve_server.ops.batch_norm.cpu.family import CpuBatchNorm
from gradserve_server.ops.batch_norm.declaration import FAMILY as BATCH_NORM
from gradserve_server.ops.cudnn_rnn.canonical import FAMILY as CUDNN_RNN_PARAMS
from gradserve_server.ops.cudnn_rnn.canonical import CudnnRnnParams
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn
from gradserve_server.ops.cudnn_rnn.declaration import FAMILY as CUDNN_RNN
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.gru.cpu.family import CpuGRU
from gradserve_server.ops.gru.declaration import FAMILY as GRU
from gradserve_server.ops.layer_norm.cpu.family import CpuLayerNorm
from gradserve_server.ops.layer_norm.declaration import FAMILY as LAYER_NORM
from gradserve_server.ops.operation import Family


def make_families(device: Device, parallel: ForkJoin) -> Mapping[str, Family]:
    """Returns the families of ops on a device, by name."""
    anywhere: dict[str, Family] = {CUDNN_RNN_PARAMS: CudnnRnnParams(device)}
    reserve_key = ReserveKey()
    if isinstance(device, CpuDevice):
        return anywhere | {
            BATCH_NORM: CpuBatchNorm(device, parallel),
            GRU: CpuGRU(device, parallel),
            CUDNN_RNN: CpuCudnnRnn(device, parallel, reserve_key),
            LAYER_NORM: CpuLayerNorm(device, parallel),
            ACTIVATION: CpuActivation(parallel),
        }
    import cupy

    from gradserve_server.devices.cuda.device import CudaDevice
    from gradserve_server.ops.activation.cuda.family import CudaActivation
    from gradserve_server.ops.batch_norm.cuda.family import CudaBatchNorm
    from gradserve_server.ops.cudnn_rnn.cuda.family import CudaCudnnRnn
    from gradserve_server.ops.gru.cuda.family import CudaGRU
    from gradserve_server.ops.layer_norm.cuda.family import CudaLayerNorm

    assert isinstance(device, CudaDevice)
    return anywhere | {
        BATCH_NORM: CudaBatchNorm(device),
        GRU: CudaGRU(device, cupy),
        CUDNN_RNN: CudaCudnnRnn(device, reserve_key),
        LAYER_NORM: CudaLayerNorm(device),
        ACTIVATION: CudaActivation(device),
    }
