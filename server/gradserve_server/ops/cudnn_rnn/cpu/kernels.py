"""The kernels of CudnnRNN on the host: their arguments and results.

U is the dtype of the computation, float32 or float64. Arrays are flat; T, B, H, G, D and H' are as in `spec`. A kernel
does some steps of one pseudo-layer in the order of its direction, which is `reverse` for direction 1; the backward
kernels do the same steps in the opposite order. Sequences that have ended are not computed, and their gradients are 0.

All kernels take, in this order:

* begin, count: The steps to do, counted in the kernel's own order.
* first_row, end_row: The sequences to do; with own_products, all of them.
* own_products: Not for lstm_forward. Whether the kernel itself multiplies by the recurrent weights, which for few rows
  is faster than BLAS. Otherwise it does one step, whose products are computed already. Not with a projection.
* reverse: See above.
* steps: T.
* units: H.
* is_relu: Only for a network without gates.
* lengths: int64, [B].
* weights: Not for lstm_forward. R, U, [G, H, H]. Read with own_products.

The forward kernels continue with

* recurrent: U, [B, G, H]: the products of h_(t-1) and R. With own_products, scratch memory.
* bias: U, [G, H], the sum of both; for gru bW + bR of r and z, bW of n, bR of n.
* gates: U, [T, B, G, H]: the products of the input and W. For lstm and gru they are replaced by the gates.
* lstm: cells: U, [T + 1, B, H]; see `saved`.
* gru: candidates: U, [T, B, H]: a result, R_n h_(t-1) + bR_n.
* outputs: U, [T + 2, B, stride], where this direction has the H elements from `offset`; see `saved`.
* stride, offset: See outputs.

and the backward kernels with

* lstm and gru: gates: The result of the forward kernel.
* lstm: cells; gru: candidates: The results of the forward kernel.
* gru and networks without gates: outputs: The result of the forward kernel.
* d_outputs: U, [T, B, stride]: the gradients with respect to the outputs.
* stride, offset: See outputs.
* incoming: U, [2, B, H]: first the gradient from the step done before, which with own_products is scratch memory that
  starts as 0; then the gradient with respect to the final state.
* lstm: d_cells: U, [B, H]: at first the gradient with respect to the final c, in the end to the initial c.
* gru: carry: U, [B, H]: 0 at first; the part of the gradient with respect to h_(t-1) that does not pass through R.
* d_gates: U, [T, B, G, H]: a result, the gradients with respect to the arguments of the gates' functions. For gru
  [T, B, 4, H]: n, r, z, and the gradient with respect to R_n h_(t-1) + bR_n.

The forward scan of an lstm does all steps with their products, on several threads. Instead of the first four arguments,
it takes

* part_units: The units of each part of a step.
* taken: int64, [T, parts]: zeros, to count the threads that wanted to do each part; the first one does it.

then all others from `reverse` on, weights included, and counters; see `ChunkedKernels`.
"""

from dataclasses import dataclass

from gradserve_server.devices.host.kernel_table import ELEMENTS, ChunkedKernels, Declared, Kernel, KernelTable
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
        """Returns the forward kernel."""
        return {Mode.LSTM: self.lstm_forward, Mode.GRU: self.gru_forward}.get(mode, self.vanilla_forward)

    def backward(self, mode: Mode) -> Kernel:
        """Returns the backward kernel."""
        return {Mode.LSTM: self.lstm_backward, Mode.GRU: self.gru_backward}.get(mode, self.vanilla_backward)


@dataclass(frozen=True)
class LstmScans(ChunkedKernels):
    """The forward scan of an lstm for one U."""

    forward: Kernel


_PLACE, _SIZES = "int64, int64, int64, int64", "bool, int64, int64"
_LSTM = f"{_PLACE}, {_SIZES}, const int64[]"
_GATED = f"{_PLACE}, bool, {_SIZES}, const int64[], const {{U}}[]"
_VANILLA = f"{_PLACE}, bool, {_SIZES}, bool, const int64[], const {{U}}[]"
_SCAN = f"int64, int64[], {_SIZES}, const int64[], const {{U}}[]"
_POSITION = "int64, int64"
_READ, _MADE = "const {U}[]", "{U}[]"

CUDNN_RNN = KernelTable(
    what="CudnnRNN",
    package=__package__,
    kernels=Kernels,
    types={dtype: {"U": ELEMENTS[dtype]} for dtype in (FLOAT32, FLOAT64)},
    declared={
        "lstm_forward": Declared("lstm.lstm_forward", ", ".join((_LSTM, _MADE, _READ, _MADE, _MADE, _MADE, _POSITION))),
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

LSTM_SCANS = KernelTable(
    what="CudnnRNN's lstm",
    package=__package__,
    kernels=LstmScans,
    types=CUDNN_RNN.types,
    declared={
        "forward": Declared(
            "lstm_scan.lstm_scan_forward", ", ".join((_SCAN, _MADE, _READ, _MADE, _MADE, _MADE, _POSITION))
        ),
    },
)
