"""The kernels of CudnnRNN on the host: what they take and do.

U is float32 or float64, what is computed in. Arrays are flat; T, B, H, G, D and H' are those of `spec`. A kernel does
some steps of one pseudo-layer, in the order of its direction, which is `reverse` for direction 1; the backward kernels
go through the same steps in the opposite order. For sequences that have ended nothing is computed, and gradients are 0.

All take, in this order:

* begin, count: The steps to do, counted in the kernel's own order.
* first_row, end_row: The sequences to do them for, which with own_products are all.
* own_products: Whether the kernel multiplies with the recurrent weights itself, which for few rows is faster than BLAS.
  Otherwise it does one step, for which the products are there. Not with a projection.
* reverse: See above.
* steps: T.
* units: H.
* is_relu: Only those of a network without gates.
* lengths: int64, [B].
* weights: R, U, [G, H, H]. Read for own_products.

The forward kernels go on with

* recurrent: U, [B, G, H]: products of h_(t-1) and R. With own_products a scratch.
* bias: U, [G, H], the sum of both; for gru bW + bR of r and z, bW of n, bR of n.
* gates: U, [T, B, G, H]: products of the input and W. In lstm and gru replaced by the gates.
* lstm: cells: U, [T + 1, B, H]; see `saved`.
* gru: candidates: U, [T, B, H]: gets R_n h_(t-1) + bR_n.
* outputs: U, [T + 2, B, stride], of which the H elements from `offset` are those of this direction; see `saved`.
* stride, offset: See outputs.

and the backward kernels with

* lstm and gru: gates: As the forward kernel left them.
* lstm: cells; gru: candidates: As the forward kernel left them.
* gru and networks without gates: outputs: As the forward kernel left them.
* d_outputs: U, [T, B, stride]: gradients with respect to the outputs.
* stride, offset: See outputs.
* incoming: U, [2, B, H]: the gradient that comes from the step done before, with own_products a scratch that is 0 at
  first; and that with respect to the final state.
* lstm: d_cells: U, [B, H]: the gradient with respect to the final c at first, to the initial c in the end.
* gru: carry: U, [B, H]: 0 at first; the part of the gradient with respect to h_(t-1) that does not come through R.
* d_gates: U, [T, B, G, H]: gets the gradients with respect to what the gates' functions are taken of. For gru
  [T, B, 4, H]: n, r, z, and the gradient with respect to R_n h_(t-1) + bR_n.
"""

from dataclasses import dataclass

from gradserve_server.devices.host.kernel_table import ELEMENTS, Declared, Kernel, KernelTable
from gradserve_server.ops.cudnn_rnn.network import Mode
from gradserve_server.ops.dtypes import FLOAT32, FLOAT64


@dataclass(frozen=True)
class Kernels:
    """The kernels for one U."""

    lstm_forward: Kernel
    lstm_backward: Kernel
    gru_forward: Kernel
    gru_backward: Kernel
    vanilla_forward: Kernel
    vanilla_backward: Kernel

    def forward(self, mode: Mode) -> Kernel:
        """Returns the kernel for the way forward."""
        return {Mode.LSTM: self.lstm_forward, Mode.GRU: self.gru_forward}.get(mode, self.vanilla_forward)

    def backward(self, mode: Mode) -> Kernel:
        """Returns the kernel for the way back."""
        return {Mode.LSTM: self.lstm_backward, Mode.GRU: self.gru_backward}.get(mode, self.vanilla_backward)


_STEPS = "int64, int64, int64, int64, bool, bool, int64, int64"
_GATED = f"{_STEPS}, const int64[], const {{U}}[]"
_VANILLA = f"{_STEPS}, bool, const int64[], const {{U}}[]"
_POSITION = "int64, int64"
_READ, _MADE = "const {U}[]", "{U}[]"

CUDNN_RNN = KernelTable(
    what="CudnnRNN",
    package=__package__,
    kernels=Kernels,
    types={dtype: {"U": ELEMENTS[dtype]} for dtype in (FLOAT32, FLOAT64)},
    declared={
        "lstm_forward": Declared(
            "lstm.lstm_forward", ", ".join((_GATED, _MADE, _READ, _MADE, _MADE, _MADE, _POSITION))
        ),
        "lstm_backward": Declared(
            "lstm.lstm_backward", ", ".join((_GATED, _READ, _READ, _READ, _POSITION, _MADE, _MADE, _MADE))
        ),
        "gru_forward": Declared("gru.gru_forward", ", ".join((_GATED, _MADE, _READ, _MADE, _MADE, _MADE, _POSITION))),
        "gru_backward": Declared(
            "gru.gru_backward", ", ".join((_GATED, _READ, _READ, _READ, _READ, _POSITION, _MADE, _MADE, _MADE))
        ),
        "vanilla_forward": Declared(
            "vanilla.vanilla_forward", ", ".join((_VANILLA, _MADE, _READ, _READ, _MADE, _POSITION))
        ),
        "vanilla_backward": Declared(
            "vanilla.vanilla_backward", ", ".join((_VANILLA, _READ, _READ, _POSITION, _MADE, _MADE))
        ),
    },
)
