"""The gradient ops of a server as functions that autograd differentiates.

y, batch_mean, batch_variance = gradserve.torch.functions.fused_batch_norm(client, x, scale, offset)
y.sum().backward()

Forward and backward are one call of the server each. What the backward needs stays with the caller, so nothing is left
on the server if it never runs. Second derivatives of normalizations are computed by PyTorch; those of recurrent
networks are refused. The functions work under torch.compile, torch.func.grad and torch.func.vmap.
"""

from gradserve.public_names import publish as _publish
from gradserve.torch.functions.normalization import FusedBatchNorm, fused_batch_norm, layer_norm
from gradserve.torch.functions.recurrent import CudnnRNN, cudnn_rnn, gru_block_cell

__all__ = ["CudnnRNN", "FusedBatchNorm", "cudnn_rnn", "fused_batch_norm", "gru_block_cell", "layer_norm"]

_publish(__name__, globals(), __all__)
