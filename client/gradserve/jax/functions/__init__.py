"""The gradient ops of a server as functions that JAX differentiates, outside `jax.jit` and inside.

y, batch_mean, batch_variance = gradserve.jax.functions.fused_batch_norm(client, x, scale, offset)

Their gradients are one more call of the server, in reverse mode (`jax.grad`, `jax.vjp`); gradients of gradients are
refused. Inside `jax.jit` a call is a `jax.pure_callback` on the host: JAX leaves it out if nobody uses its results.
`jax.vmap` makes one call for each element. On several devices, a function of sharded arrays is one call with the whole
arrays.
"""

from gradserve.jax.functions.normalization import FusedBatchNorm, fused_batch_norm, layer_norm
from gradserve.jax.functions.recurrent import CudnnRNN, cudnn_rnn, gru_block_cell
from gradserve.public_names import publish as _publish

__all__ = ["CudnnRNN", "FusedBatchNorm", "cudnn_rnn", "fused_batch_norm", "gru_block_cell", "layer_norm"]

_publish(__name__, globals(), __all__)
