"""Recurrent networks: CudnnRNN and GRUBlockCell."""

from typing import Any, NamedTuple

import torch

from gradserve.client import Client
from gradserve.torch.functions.served import (
    checked_name,
    differentiable,
    keep_client,
    no_second_derivative,
    plain,
    served_op,
)
from gradserve_protocol.errors import InvalidArgumentError

_LSTM = "lstm"
_GRU_INPUTS = ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")
_HOST_RESERVED_BYTES = 128
_NETWORK = {
    "rnn_mode": str,
    "input_mode": str,
    "direction": str,
    "dropout": float,
    "seed": int,
    "seed2": int,
    "num_proj": int,
    "time_major": bool,
}
_ATTRIBUTES = ", ".join(f"{kind.__name__} {name}" for name, kind in _NETWORK.items())
_SEQUENCES = "Tensor input, Tensor input_h, Tensor? input_c, Tensor params, Tensor? sequence_lengths"


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

    One call of the server, and another one in the backward, which has no derivative. T is the number of
    steps, I the size of the input, H the number of units, H' = num_proj or H; all tensors have the dtype of `input`:
    float16, bfloat16, float32 or float64.

    Args:
        client: The client of the server that computes.
        input: [T, B, I], or [B, T, I] if not `time_major`.
        input_h: [L * D, B, H'], or [B, L * D, H'] if not `time_major`.
        input_c: [L * D, B, H], or [B, L * D, H] if not `time_major`, for lstm; None for other modes.
        params: The parameter vector; `RawOps.CudnnRNNCanonicalToParamsV2` makes it.
        sequence_lengths: int32 or int64, [B], each from 1 to T. None: all are T.
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
        InvalidArgumentError: A tensor has another shape or dtype; or, in a backward, `is_training` was False, or a
            gradient of a gradient is needed.
        GradserveError: See `RawOps.CudnnRNNV3`.
    """
    name = checked_name(
        client, input=input, input_h=input_h, input_c=input_c, params=params, sequence_lengths=sequence_lengths
    )
    given = (rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj, time_major)
    network = [plain(kind, value, name) for (name, kind), value in zip(_NETWORK.items(), given, strict=True)]
    has_cells = rnn_mode == _LSTM
    cells = input_c if has_cells else None
    training = plain(bool, is_training, "is_training")
    output, output_h, output_c, _, _ = _rnn(name, input, input_h, cells, params, sequence_lengths, *network, training)
    return CudnnRNN(output, output_h, output_c if has_cells else None)


def _rnn_fake(_client: str, sequences: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, *others: Any) -> Any:
    direction, is_training = others[4], others[-1]
    features = h.shape[2] * (2 if direction == "bidirectional" else 1)
    reserve: tuple[Any, ...] = ()
    host_reserved: tuple[int, ...] = ()
    if is_training:
        reserve, host_reserved = (torch.library.get_ctx().new_dynamic_size(),), (_HOST_RESERVED_BYTES,)
    return (
        sequences.new_empty((*sequences.shape[:2], features)),
        h.new_empty(h.shape),
        h.new_empty(()) if c is None else c.new_empty(c.shape),
        sequences.new_empty(reserve),
        sequences.new_empty(host_reserved, dtype=torch.int8),
    )


@served_op(
    f"cudnn_rnn(str client, {_SEQUENCES}, {_ATTRIBUTES}, bool is_training) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rnn_fake,
)
def _rnn_op(client: Client, sequences: Any, h: Any, c: Any, params: Any, lengths: Any, *attributes: Any) -> Any:
    *network, is_training = attributes
    return client.raw_ops.CudnnRNNV3(
        **_named(sequences, h, c, params, lengths), **dict(zip(_NETWORK, network, strict=True)), is_training=is_training
    )


def _rnn_setup(ctx: Any, inputs: Any, output: Any) -> None:
    client, sequences, h, c, params, lengths, *ctx.network, ctx.is_training = inputs
    sequences_out, _, output_c, reserve_space, host_reserved = output
    keep_client(ctx, client)
    ctx.mark_non_differentiable(*(() if c is not None else (output_c,)), reserve_space, host_reserved)
    ctx.save_for_backward(sequences, h, c, params, lengths, sequences_out, reserve_space, host_reserved)


def _rnn_backward(ctx: Any, d_output: torch.Tensor, d_h: torch.Tensor, d_c: torch.Tensor, *_: Any) -> Any:
    if not ctx.is_training:
        raise InvalidArgumentError(
            "expected is_training=True of cudnn_rnn for a backward, got False; use torch.no_grad() where no "
            "gradient is needed",
            field="is_training",
        )
    c = ctx.saved_tensors[2]
    d_input, d_input_h, d_input_c, d_params = _rnn_grad(
        ctx.client, d_output, d_h, d_c, *ctx.saved_tensors, *ctx.network
    )
    return None, d_input, d_input_h, None if c is None else d_input_c, d_params, *(None,) * (2 + len(ctx.network))


def _rnn_fake_grad(
    _client: str, _d_output: Any, _d_h: Any, _d_c: Any, sequences: torch.Tensor, h: torch.Tensor, c: Any, *others: Any
) -> Any:
    params = others[0]
    return (
        sequences.new_empty(sequences.shape),
        h.new_empty(h.shape),
        h.new_empty(() if c is None else c.shape),
        params.new_empty(params.shape),
    )


@served_op(
    f"cudnn_rnn_grad(str client, Tensor d_output, Tensor d_h, Tensor d_c, {_SEQUENCES}, Tensor output, "
    f"Tensor reserve_space, Tensor host_reserved, {_ATTRIBUTES}) -> (Tensor, Tensor, Tensor, Tensor)",
    _rnn_fake_grad,
)
def _rnn_grad_op(client: Client, d_output: Any, d_h: Any, d_c: Any, *others: Any) -> Any:
    sequences, h, c, params, lengths, output, reserve_space, host_reserved, *network = others
    # The last states are those of the output; the gradient depends on their shapes alone.
    cells = {} if c is None else {"output_c": torch.zeros_like(c), "output_c_backprop": d_c}
    computed = client.raw_ops.CudnnRNNBackpropV3(
        **_named(sequences, h, c, params, lengths),
        **cells,
        output=output,
        output_h=torch.zeros_like(h),
        output_backprop=d_output,
        output_h_backprop=d_h,
        reserve_space=reserve_space,
        host_reserved=host_reserved,
        **dict(zip(_NETWORK, network, strict=True)),
    )
    return computed.input_backprop, computed.input_h_backprop, computed.input_c_backprop, computed.params_backprop


def _named(sequences: Any, h: Any, c: Any, params: Any, lengths: Any) -> dict[str, Any]:
    cells = {} if c is None else {"input_c": c}
    return {"input": sequences, "input_h": h, "params": params, "sequence_lengths": lengths} | cells


def _rnn_setup_grad(_ctx: Any, _inputs: Any, _output: Any) -> None: ...


_rnn_grad = differentiable(_rnn_grad_op, _rnn_setup_grad, no_second_derivative("cudnn_rnn"))
_rnn = differentiable(_rnn_op, _rnn_setup, _rnn_backward)


def gru_block_cell(
    client: Client,
    x: torch.Tensor,
    h_prev: torch.Tensor,
    w_ru: torch.Tensor,
    w_c: torch.Tensor,
    b_ru: torch.Tensor,
    b_c: torch.Tensor,
) -> torch.Tensor:
    """Computes one step of a GRU for a batch, as `RawOps.GRUBlockCell` does.

    One call of the server, and another one in the backward, which has no derivative. B is the batch, I the size of the
    input, H that of the cell; all tensors have the dtype of x: float16, bfloat16, float32 or float64.

        [r, u] = sigmoid([x, h_prev] . w_ru + b_ru)
        c      = tanh([x, h_prev r] . w_c + b_c)
        h      = u h_prev + (1 - u) c

    Args:
        client: The client of the server that computes.
        x: Shape [B, I].
        h_prev: Shape [B, H]: the previous state.
        w_ru: Shape [I + H, 2H]: rows for x, then for h_prev; columns for r, then for u.
        w_c: Shape [I + H, H].
        b_ru: Shape [2H].
        b_c: Shape [H].

    Returns:
        h, the new state, shape [B, H].

    Raises:
        InvalidArgumentError: A tensor has another shape or dtype; or, in a backward, a gradient of a gradient is
            needed.
        GradserveError: See `RawOps.GRUBlockCell`.
    """
    name = checked_name(client, x=x, h_prev=h_prev, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c)
    h: torch.Tensor = _gru(name, x, h_prev, w_ru, w_c, b_ru, b_c)[0]
    return h


def _gru_fake(_client: str, _x: torch.Tensor, h_prev: torch.Tensor, *_: Any) -> Any:
    return tuple(h_prev.new_empty(h_prev.shape) for _ in range(4))


@served_op(
    "gru_block_cell(str client, Tensor x, Tensor h_prev, Tensor w_ru, Tensor w_c, Tensor b_ru, Tensor b_c) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _gru_fake,
)
def _gru_op(client: Client, *inputs: Any) -> Any:
    outputs = client.raw_ops.GRUBlockCell(**dict(zip(_GRU_INPUTS, inputs, strict=True)))
    return outputs.h, outputs.r, outputs.u, outputs.c


def _gru_setup(ctx: Any, inputs: Any, output: Any) -> None:
    client, x, h_prev, w_ru, w_c, _, _ = inputs
    _, *gates = output
    keep_client(ctx, client)
    ctx.mark_non_differentiable(*gates)
    ctx.save_for_backward(x, h_prev, w_ru, w_c, *gates)


def _gru_backward(ctx: Any, d_h: torch.Tensor, *_: Any) -> Any:
    return None, *_gru_grad(ctx.client, d_h, *ctx.saved_tensors)


def _gru_fake_grad(_client: str, _d_h: torch.Tensor, *inputs: torch.Tensor) -> Any:
    biases = tuple(weights.new_empty(weights.shape[1:]) for weights in inputs[2:4])
    return *(each.new_empty(each.shape) for each in inputs[:4]), *biases


@served_op(
    "gru_block_cell_grad(str client, Tensor d_h, Tensor x, Tensor h_prev, Tensor w_ru, Tensor w_c, Tensor r, Tensor u, "
    "Tensor c) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gru_fake_grad,
)
def _gru_grad_op(client: Client, d_h: Any, x: Any, h_prev: Any, w_ru: Any, w_c: Any, r: Any, u: Any, c: Any) -> Any:
    computed = client.raw_ops.GRUBlockCellGrad(
        x=x,
        h_prev=h_prev,
        w_ru=w_ru,
        w_c=w_c,
        b_ru=w_ru.new_zeros(w_ru.shape[1:]),  # the gradient depends on the biases' shapes alone
        b_c=w_c.new_zeros(w_c.shape[1:]),
        r=r,
        u=u,
        c=c,
        d_h=d_h,
        weight_gradients=True,
    )
    return computed.d_x, computed.d_h_prev, computed.d_w_ru, computed.d_w_c, computed.d_b_ru, computed.d_b_c


def _gru_setup_grad(_ctx: Any, _inputs: Any, _output: Any) -> None: ...


_gru_grad = differentiable(_gru_grad_op, _gru_setup_grad, no_second_derivative("gru_block_cell"))
_gru = differentiable(_gru_op, _gru_setup, _gru_backward)
