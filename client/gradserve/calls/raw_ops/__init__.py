"""The calls of `Client.raw_ops`, one module for each family of ops."""

from gradserve.calls.raw_ops.accumulators import AccumulatorOps
from gradserve.calls.raw_ops.batch_norm import BatchNormCalls
from gradserve.calls.raw_ops.cudnn_rnn import CudnnRnnCalls
from gradserve.calls.raw_ops.cudnn_rnn_params import CudnnRnnParamsCalls
from gradserve.calls.raw_ops.gru import GRUCalls
from gradserve.calls.raw_ops.sparse_accumulators import SparseAccumulatorOps


class RawOpsCalls(AccumulatorOps, SparseAccumulatorOps, BatchNormCalls, GRUCalls, CudnnRnnCalls, CudnnRnnParamsCalls):
    """Calls of `RawOps`."""
