"""Recurrent networks: cuDNN's, and the GRU cell."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradserve.client import Client
from gradserve.jax.functions.served import Arrays, ServedOp, as_array, like
from gradserve.results import TensorHandle

_INPUTS = ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")
_LSTM = "lstm"


def gru_block_cell(client: Client, x: Any, h_prev: Any, w_ru: Any, w_c: Any, b_ru: Any, b_c: Any) -> jax.Array:
    """Computes one step of a GRU for a batch, as `RawOps.GRUBlockCell` does.

    One call of the server, and another one for the gradient. B is the batch, I the size of the input, H that of the
    cell; all arrays have the dtype of x: float16, bfloat16, float32 or float64. It can be in the body of a
    `jax.lax.scan`.

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
        InvalidArgumentError: An array has another shape or dtype. Inside `jax.jit`, a JaxRuntimeError that says so.
        GradserveError: See `RawOps.GRUBlockCell`; likewise.
    """
    x = jnp.asarray(x)
    inputs = (x, *(as_array(each, x.dtype) for each in (h_prev, w_ru, w_c, b_ru, b_c)))
    state = like(inputs[1])

    def forward(*inputs: Any) -> Arrays:
        r, u, c, h = client.raw_ops.GRUBlockCell(**dict(zip(_INPUTS, inputs, strict=True)))
        return h, r, u, c

    def backward(inputs: Any, results: Any, gradients: Any) -> Arrays:
        (_, r, u, c), (d_h,) = results, gradients
        computed = client.raw_ops.GRUBlockCellGrad(
            **dict(zip(_INPUTS, inputs, strict=True)), r=r, u=u, c=c, d_h=d_h, weight_gradients=True
        )
        return computed.d_x, computed.d_h_prev, computed.d_w_ru, computed.d_w_c, computed.d_b_ru, computed.d_b_c

    op = ServedOp(
        "gru_block_cell",
        forward,
        backward,
        results=(state, state, state, state),
        num_outputs=1,
        num_served=1,
        differentiable=_INPUTS,
    )
    (h,) = op(*inputs)
    return h


class CudnnRNN(NamedTuple):
    """The outputs of `cudnn_rnn`.

    Attributes:
        output: [T, B, D * H'], or [B, T, D * H']; 0 beyond the end of a sequence.
        output_h: The shape of input_h: the state after the last step of each sequence.
        output_c: The shape of input_c, likewise; None unless the mode is lstm.
    """

    output: jax.Array
    output_h: jax.Array
    output_c: jax.Array | None


def cudnn_rnn(
    client: Client,
    input: Any,  # noqa: A002  the name of TensorFlow's argument
    input_h: Any,
    input_c: Any,
    params: Any,
    *,
    sequence_lengths: Any = None,
    rnn_mode: str = _LSTM,
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: Any = 0,
    seed2: int = 0,
    num_proj: int = 0,
    is_training: bool = True,
    time_major: bool = True,
) -> CudnnRNN:
    """Applies a recurrent network of L layers and D directions to B sequences, as `RawOps.CudnnRNNV3` does.

    The gradient computes the network again, on the server, so nothing but the inputs and the gradients travels: what
    cuDNN keeps for its gradient is several times as large, and only the server knows how large. T is the number of
    steps, I the size of the input, H the number of units, H' = num_proj or H; all floats have the dtype of `input`:
    float16, bfloat16, float32 or float64.

    Args:
        client: The client of the server that computes.
        input: [T, B, I], or [B, T, I] if not `time_major`.
        input_h: [L * D, B, H'], or [B, L * D, H'] if not `time_major`.
        input_c: [L * D, B, H], or [B, L * D, H] if not `time_major`, for lstm; None for other modes.
        params: The parameter vector; `RawOps.CudnnRNNCanonicalToParamsV2` makes it.
        sequence_lengths: Integers of any width, [B], each from 1 to T. None: all are T.
        rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
        input_mode: "linear_input", "skip_input" or "auto_select".
        direction: "unidirectional" or "bidirectional".
        dropout: The probability of dropping an element of a layer's input in training; the first layer drops none.
        seed: The seed of the dropout, together with `seed2`. An integer, or an integer array without dimensions, which
            may differ in each run of one compiled program.
        seed2: See `seed`.
        num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
        is_training: Whether to drop elements. Without it there is no gradient.
        time_major: Whether time is the first dimension; otherwise the batch is.

    Raises:
        InvalidArgumentError: An array has another shape or dtype: inside `jax.jit`, a JaxRuntimeError that says so. Or
            there is a gradient although `is_training` is False.
        GradserveError: See `RawOps.CudnnRNNV3`; inside `jax.jit` a JaxRuntimeError, too.
    """
    floats = {"input": input, "input_h": input_h}
    if rnn_mode == _LSTM:
        floats["input_c"] = input_c
    dtype = jnp.asarray(input).dtype
    inputs = {name: as_array(each, dtype) for name, each in (floats | {"params": params}).items()}
    differentiable = tuple(inputs)
    if sequence_lengths is not None:
        inputs["sequence_lengths"] = _lengths(sequence_lengths)
    network = {
        "rnn_mode": rnn_mode,
        "input_mode": input_mode,
        "direction": direction,
        "dropout": dropout,
        "seed2": seed2,
        "num_proj": num_proj,
        "time_major": time_major,
    }
    if isinstance(seed, int | np.integer):
        network["seed"] = int(seed)
    else:
        inputs["seed"] = jnp.asarray(seed)

    def named(given: Any) -> dict[str, Any]:
        arguments = dict(zip(inputs, given, strict=True)) | network
        return arguments | {"seed": int(arguments["seed"])}

    op = ServedOp(
        "cudnn_rnn",
        lambda *given: _forward(client, named(given), is_training=is_training),
        lambda given, _, gradients: _backward(client, named(given), gradients),
        results=_results(inputs, 2 if direction == "bidirectional" else 1),
        num_outputs=len(floats),
        num_served=len(floats),
        differentiable=differentiable,
        others=tuple(inputs)[len(differentiable) :],
        refusal=""
        if is_training
        else "expected is_training=True of cudnn_rnn for a gradient, got False, for which the server computes none",
    )
    outputs = op(*inputs.values())
    return CudnnRNN(outputs[0], outputs[1], outputs[2] if rnn_mode == _LSTM else None)


def _lengths(given: Any) -> jax.Array:
    """Returns lengths as int32, in which the server takes them, of arrays whose width JAX or the caller chose."""
    lengths = as_array(given, jnp.int32)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        return lengths  # the server refuses them
    maximum = jnp.iinfo(jnp.int32).max
    if jnp.iinfo(lengths.dtype).max > maximum:  # a length beyond int32 must not wrap around to one that is allowed
        lengths = jnp.clip(lengths, 0, maximum)
    return lengths.astype(jnp.int32)


def _results(inputs: dict[str, jax.Array], num_directions: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    sequences, states = inputs["input"], inputs["input_h"]
    width = tuple(num_directions * size for size in states.shape[-1:])
    output = like(sequences, sequences.shape[:-1] + width)
    return output, like(states), *([like(inputs["input_c"])] if "input_c" in inputs else [])


def _forward(client: Client, arguments: dict[str, Any], *, is_training: bool) -> Arrays:
    """Computes the network; leaves what only a gradient needs on the server, and deletes it there."""
    num_outputs = 3 if arguments["rnn_mode"] == _LSTM else 2
    if not is_training:
        return client.raw_ops.CudnnRNNV3(**arguments, is_training=False)[:num_outputs]
    kept = client.raw_ops.CudnnRNNV3(**arguments, keep=True)
    try:
        return client.get_all(kept[:num_outputs])
    finally:
        client.delete(*kept)


def _backward(client: Client, arguments: dict[str, Any], gradients: Arrays) -> Arrays:
    """Computes the network and its gradient; the inputs travel once, what lies between does not leave the server."""
    is_lstm = arguments["rnn_mode"] == _LSTM
    arrays = [name for name in ("input", "input_h", "input_c", "params") if name in arguments]
    stored = client.put_all([arguments[name] for name in arrays])
    temporary: list[TensorHandle] = list(stored)
    try:
        arguments = arguments | dict(zip(arrays, stored, strict=True))
        forward = client.raw_ops.CudnnRNNV3(**arguments, keep=True)
        temporary += forward
        cells = {"output_c": forward.output_c, "output_c_backprop": gradients[2]} if is_lstm else {}
        computed = client.raw_ops.CudnnRNNBackpropV3(
            **arguments,
            **cells,
            output=forward.output,
            output_h=forward.output_h,
            output_backprop=gradients[0],
            output_h_backprop=gradients[1],
            reserve_space=forward.reserve_space,
            host_reserved=forward.host_reserved,
        )
    finally:
        client.delete(*temporary)
    cell_gradient = (computed.input_c_backprop,) if is_lstm else ()
    return computed.input_backprop, computed.input_h_backprop, *cell_gradient, computed.params_backprop
