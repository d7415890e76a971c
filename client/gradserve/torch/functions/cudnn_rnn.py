"""CudnnRNN."""

from typing import Any, NamedTuple

import torch

from gradserve.client import Client
from gradserve.errors import InvalidArgumentError
from gradserve.torch.functions.served import Arrays, Computed, ServedOp

_LSTM = "lstm"


class CudnnRNN(NamedTuple):
    """The outputs of `cudnn_rnn`.

    Attributes:
        output: [T, B, D * H'], or [B, T, D * H']; 0 beyond the end of a sequence.
        output_h: The shape of input_h: the state after the last step of each sequence.
        output_c: The shape of input_c, likewise; None unless the mode is lstm.
    """

    output: torch.Tensor
    output_h: torch.Tensor
    output_c: torch.Tensor | None


def cudnn_rnn(
    client: Client,
    input: torch.Tensor,  # noqa: A002  the name of TensorFlow's argument
    input_h: torch.Tensor,
    input_c: torch.Tensor | None,
    params: torch.Tensor,
    *,
    sequence_lengths: torch.Tensor | None = None,
    rnn_mode: str = _LSTM,
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    num_proj: int = 0,
    is_training: bool = True,
    time_major: bool = True,
) -> CudnnRNN:
    """Applies a recurrent network of L layers and D directions to B sequences, as `RawOps.CudnnRNNV3` does.

    One call of the server, and another one in the backward. T is the number of steps, I the size of the input, H the
    number of units, H' = num_proj or H; all tensors have the dtype of `input`: float16, bfloat16, float32 or float64.

    Args:
        client: The client of the server that computes.
        input: [T, B, I], or [B, T, I] if not `time_major`.
        input_h: [L * D, B, H'], or [B, L * D, H'] if not `time_major`.
        input_c: [L * D, B, H], or [B, L * D, H] if not `time_major`, for lstm; None for other modes.
        params: The parameter vector; `RawOps.CudnnRNNCanonicalToParamsV2` makes it.
        sequence_lengths: int32, [B], each from 1 to T. None: all are T.
        rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
        input_mode: "linear_input", "skip_input" or "auto_select".
        direction: "unidirectional" or "bidirectional".
        dropout: The probability of dropping an element of a layer's input in training; the first layer drops none.
        seed: The seed of the dropout, together with `seed2`.
        seed2: See `seed`.
        num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
        is_training: Whether to keep what the backward needs, and to drop elements. Without it there is no backward.
        time_major: Whether time is the first dimension; otherwise the batch is.

    Raises:
        InvalidArgumentError: A tensor has another shape or dtype; or, in the backward, `is_training` was False.
        GradserveError: See `RawOps.CudnnRNNV3`.
    """
    network = {
        "rnn_mode": rnn_mode,
        "input_mode": input_mode,
        "direction": direction,
        "dropout": dropout,
        "seed": seed,
        "seed2": seed2,
        "num_proj": num_proj,
        "time_major": time_major,
    }
    has_cells = rnn_mode == _LSTM

    def named(inputs: Any) -> dict[str, Any]:
        sequences, h, c, parameters = inputs
        given = {"input": sequences, "input_h": h, "params": parameters, "sequence_lengths": sequence_lengths}
        return given | network | ({"input_c": c} if has_cells else {})

    def forward(*inputs: Any) -> Computed:
        outputs = client.raw_ops.CudnnRNNV3(**named(inputs), is_training=is_training)
        last_c = outputs.output_c if has_cells else None
        return Computed((outputs.output, outputs.output_h, last_c), (outputs.reserve_space, outputs.host_reserved))

    def backward(inputs: Any, outputs: Any, residuals: Any, gradients: Any) -> Arrays:
        if not is_training:
            raise InvalidArgumentError(
                "expected is_training=True of cudnn_rnn for a backward, got False; use torch.no_grad() where no "
                "gradient is needed",
                field="is_training",
            )
        cells = {"output_c": outputs[2], "output_c_backprop": gradients[2]} if has_cells else {}
        computed = client.raw_ops.CudnnRNNBackpropV3(
            **named(inputs),
            **cells,
            output=outputs[0],
            output_h=outputs[1],
            output_backprop=gradients[0],
            output_h_backprop=gradients[1],
            reserve_space=residuals[0],
            host_reserved=residuals[1],
        )
        cell_gradient = computed.input_c_backprop if has_cells else None
        return computed.input_backprop, computed.input_h_backprop, cell_gradient, computed.params_backprop

    return CudnnRNN(*ServedOp(forward, backward, 3)(input, input_h, input_c if has_cells else None, params))
