"""CudnnRNN and its gradient, in TensorFlow's three versions.

The server knows the newest version; the older ones are views of it that take less and return less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradserve.calls.exchange import Operation
from gradserve.calls.op_wire import as_op_input, run_op, without_output
from gradserve.op_outputs import CudnnRNNBackpropOutputs, CudnnRNNOutputs, CudnnRNNV3Outputs
from gradserve.results import Tensor, TensorHandle, TensorLike
from gradserve.v1 import cudnn_rnn_messages_pb2 as messages_pb2
from gradserve.wire.payload import Array

_FLOAT32, _INT32, _INT8 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int8)

_OF_LSTM = frozenset({"input_c", "output_c", "output_c_backprop"})
"""Inputs that other networks do not have."""

_Inputs = dict[str, Array | TensorHandle]


class CudnnRnnCalls:
    """CudnnRNN and its gradient."""

    def CudnnRNN(
        self,
        *,
        input: TensorLike,  # noqa: A002  (TensorFlow's name)
        input_h: TensorLike,
        input_c: TensorLike | None = None,
        params: TensorLike,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0,
        seed: int = 0,
        seed2: int = 0,
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNOutputs[Tensor]]:
        """Applies a recurrent network: CudnnRNNV3 with time first, whole sequences and without a projection.

        T is the number of steps, B that of sequences, I the size of the input, L the number of layers, D that of
        directions, and H that of units. All floats have the dtype of `input`: float16, bfloat16, float32 or float64.

        Args:
            input: [T, B, I].
            input_h: [L * D, B, H]; layer * D + direction.
            input_c: [L * D, B, H]. For lstm; else not read.

        Returns:
            output: [T, B, D * H].
            output_h: As input_h: the state after the last step.
        """
        outputs = yield from _forward(
            _inputs(input=input, input_h=input_h, input_c=input_c, params=params),
            keep,
            lease,
            rnn_mode=rnn_mode,
            input_mode=input_mode,
            direction=direction,
            dropout=dropout,
            seed=seed,
            seed2=seed2,
            is_training=is_training,
        )
        return CudnnRNNOutputs(**(yield from without_output(outputs, "host_reserved")))

    def CudnnRNNV2(
        self,
        *,
        input: TensorLike,  # noqa: A002
        input_h: TensorLike,
        input_c: TensorLike | None = None,
        params: TensorLike,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0,
        seed: int = 0,
        seed2: int = 0,
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNV3Outputs[Tensor]]:
        """Applies a recurrent network: CudnnRNNV3 with time first, whole sequences and without a projection.

        T is the number of steps, B that of sequences, I the size of the input, L the number of layers, D that of
        directions, and H that of units. All floats have the dtype of `input`: float16, bfloat16, float32 or float64.

        Args:
            input: [T, B, I].
            input_h: [L * D, B, H]; layer * D + direction.
            input_c: [L * D, B, H]. For lstm; else not read.

        Returns:
            output: [T, B, D * H].
            output_h: As input_h: the state after the last step.
        """
        outputs = yield from _forward(
            _inputs(input=input, input_h=input_h, input_c=input_c, params=params),
            keep,
            lease,
            rnn_mode=rnn_mode,
            input_mode=input_mode,
            direction=direction,
            dropout=dropout,
            seed=seed,
            seed2=seed2,
            is_training=is_training,
        )
        return CudnnRNNV3Outputs(**outputs)

    def CudnnRNNV3(
        self,
        *,
        input: TensorLike,  # noqa: A002
        input_h: TensorLike,
        input_c: TensorLike | None = None,
        params: TensorLike,
        sequence_lengths: TensorLike | None = None,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0,
        seed: int = 0,
        seed2: int = 0,
        num_proj: int = 0,
        is_training: bool = True,
        time_major: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNV3Outputs[Tensor]]:
        """Applies a recurrent network of L layers and D directions to B sequences of up to T steps.

        H is the number of units, H' the size of the hidden state: num_proj where there is a projection, else H. All
        floats have the dtype of `input`: float16, bfloat16, float32 or float64.

        Args:
            input: [T, B, I], or [B, T, I] if not `time_major`.
            input_h: [L * D, B, H'], or [B, L * D, H'] if not `time_major`; layer * D + direction.
            input_c: [L * D, B, H], or [B, L * D, H] if not `time_major`. For lstm; else not read.
            params: The parameter vector; see `CudnnRNNCanonicalToParamsV2`.
            sequence_lengths: int32, [B], each from 1 to T; None for T each.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: The probability with which an element of the input of each layer but the first is dropped in
                training.
            seed: With `seed2` the seed of the dropout.
            seed2: See `seed`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            is_training: Keep what the gradient needs, and drop elements.
            time_major: Which dimension comes first.
            keep: Leave the outputs on the server and return their handles.
            lease: For how many seconds they live there without use; None for the server's default.

        Returns:
            output: [T, B, D * H'], or [B, T, D * H']; 0 beyond the end of a sequence.
            output_h: As input_h: the state after the last step of each sequence.
            output_c: As input_c for lstm, else a scalar.
            reserve_space: Opaque, for the gradient; a scalar when not training.
            host_reserved: Opaque, for the gradient; a scalar when not training.

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
            NotFoundError: A handle does not exist (any more).
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
        inputs = _inputs(input=input, input_h=input_h, input_c=input_c, params=params)
        outputs = yield from _forward(
            inputs | _lengths(sequence_lengths),
            keep,
            lease,
            rnn_mode=rnn_mode,
            input_mode=input_mode,
            direction=direction,
            dropout=dropout,
            seed=seed,
            seed2=seed2,
            num_proj=num_proj,
            is_training=is_training,
            time_major=time_major,
        )
        return CudnnRNNV3Outputs(**outputs)

    def CudnnRNNBackprop(
        self,
        *,
        input: TensorLike,  # noqa: A002
        input_h: TensorLike,
        input_c: TensorLike | None = None,
        params: TensorLike,
        output: TensorLike,
        output_h: TensorLike,
        output_c: TensorLike | None = None,
        output_backprop: TensorLike,
        output_h_backprop: TensorLike,
        output_c_backprop: TensorLike | None = None,
        reserve_space: TensorLike,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0,
        seed: int = 0,
        seed2: int = 0,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNBackpropOutputs[Tensor]]:
        """Gradients of CudnnRNN in training, with respect to the input, the states and the parameters.

        Args:
            output_backprop: The shape of output: the gradient with respect to it.

        Returns:
            input_backprop: The shape of input.
        """
        inputs = _inputs(
            input=input,
            input_h=input_h,
            input_c=input_c,
            params=params,
            output=output,
            output_h=output_h,
            output_c=output_c,
            output_backprop=output_backprop,
            output_h_backprop=output_h_backprop,
            output_c_backprop=output_c_backprop,
            reserve_space=reserve_space,
        )
        return (
            yield from _backprop(
                inputs,
                keep,
                lease,
                rnn_mode=rnn_mode,
                input_mode=input_mode,
                direction=direction,
                dropout=dropout,
                seed=seed,
                seed2=seed2,
            )
        )

    def CudnnRNNBackpropV2(
        self,
        *,
        input: TensorLike,  # noqa: A002
        input_h: TensorLike,
        input_c: TensorLike | None = None,
        params: TensorLike,
        output: TensorLike,
        output_h: TensorLike,
        output_c: TensorLike | None = None,
        output_backprop: TensorLike,
        output_h_backprop: TensorLike,
        output_c_backprop: TensorLike | None = None,
        reserve_space: TensorLike,
        host_reserved: TensorLike,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0,
        seed: int = 0,
        seed2: int = 0,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNBackpropOutputs[Tensor]]:
        """Gradients of CudnnRNNV2 in training, with respect to the input, the states and the parameters.

        Args:
            output_backprop: The shape of output: the gradient with respect to it.

        Returns:
            input_backprop: The shape of input.
        """
        inputs = _inputs(
            input=input,
            input_h=input_h,
            input_c=input_c,
            params=params,
            output=output,
            output_h=output_h,
            output_c=output_c,
            output_backprop=output_backprop,
            output_h_backprop=output_h_backprop,
            output_c_backprop=output_c_backprop,
            reserve_space=reserve_space,
        )
        return (
            yield from _backprop(
                inputs | {"host_reserved": as_op_input(host_reserved, _INT8, "host_reserved")},
                keep,
                lease,
                rnn_mode=rnn_mode,
                input_mode=input_mode,
                direction=direction,
                dropout=dropout,
                seed=seed,
                seed2=seed2,
            )
        )

    def CudnnRNNBackpropV3(
        self,
        *,
        input: TensorLike,  # noqa: A002
        input_h: TensorLike,
        input_c: TensorLike | None = None,
        params: TensorLike,
        sequence_lengths: TensorLike | None = None,
        output: TensorLike,
        output_h: TensorLike,
        output_c: TensorLike | None = None,
        output_backprop: TensorLike,
        output_h_backprop: TensorLike,
        output_c_backprop: TensorLike | None = None,
        reserve_space: TensorLike,
        host_reserved: TensorLike,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0,
        seed: int = 0,
        seed2: int = 0,
        num_proj: int = 0,
        time_major: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNBackpropOutputs[Tensor]]:
        """Gradients of CudnnRNNV3 in training, with respect to the input, the states and the parameters.

        Args:
            input: That of the forward call.
            input_h: That of the forward call.
            input_c: That of the forward call. For lstm; else not read.
            params: Those of the forward call.
            sequence_lengths: Those of the forward call.
            output: That of the forward call.
            output_h: That of the forward call.
            output_c: That of the forward call. For lstm; else not read.
            output_backprop: The shape of output: the gradient with respect to it. Not read beyond the end of a
                sequence.
            output_h_backprop: The shape of output_h: the gradient with respect to it.
            output_c_backprop: The shape of output_c: the gradient with respect to it. For lstm; else not read.
            reserve_space: That of the forward call; any other is refused.
            host_reserved: That of the forward call; any other is refused.
            rnn_mode: As in the forward call.
            input_mode: As in the forward call.
            direction: As in the forward call.
            dropout: As in the forward call.
            seed: As in the forward call.
            seed2: As in the forward call.
            num_proj: As in the forward call.
            time_major: As in the forward call.
            keep: Leave the outputs on the server and return their handles.
            lease: For how many seconds they live there without use; None for the server's default.

        Returns:
            input_backprop: The shape of input; 0 beyond the end of a sequence.
            input_h_backprop: The shape of input_h.
            input_c_backprop: The shape of input_c for lstm, else a scalar.
            params_backprop: The shape of params.

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
            NotFoundError: A handle does not exist (any more).
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
        inputs = _inputs(
            input=input,
            input_h=input_h,
            input_c=input_c,
            params=params,
            output=output,
            output_h=output_h,
            output_c=output_c,
            output_backprop=output_backprop,
            output_h_backprop=output_h_backprop,
            output_c_backprop=output_c_backprop,
            reserve_space=reserve_space,
        )
        described = {"host_reserved": as_op_input(host_reserved, _INT8, "host_reserved")}
        return (
            yield from _backprop(
                inputs | _lengths(sequence_lengths) | described,
                keep,
                lease,
                rnn_mode=rnn_mode,
                input_mode=input_mode,
                direction=direction,
                dropout=dropout,
                seed=seed,
                seed2=seed2,
                num_proj=num_proj,
                time_major=time_major,
            )
        )


def _inputs(**values: Any) -> _Inputs:
    """Returns those that are there; what has no dtype gets that of `input`."""
    inputs: _Inputs = {"input": as_op_input(values.pop("input"), _FLOAT32, "input")}
    for name, value in values.items():
        if value is not None or name not in _OF_LSTM:
            inputs[name] = as_op_input(value, inputs["input"].dtype, name)
    return inputs


def _lengths(sequence_lengths: TensorLike | None) -> _Inputs:
    if sequence_lengths is None:
        return {}
    return {"sequence_lengths": as_op_input(sequence_lengths, _INT32, "sequence_lengths")}


def _forward(inputs: _Inputs, keep: bool, lease: float | None, **attributes: Any) -> Operation[dict[str, Any]]:
    return run_op("CudnnRNN", messages_pb2.CudnnRNNRequest, inputs, attributes, keep=keep, lease=lease)


def _backprop(
    inputs: _Inputs, keep: bool, lease: float | None, **attributes: Any
) -> Operation[CudnnRNNBackpropOutputs[Tensor]]:
    request = messages_pb2.CudnnRNNBackpropRequest
    outputs = yield from run_op("CudnnRNNBackprop", request, inputs, attributes, keep=keep, lease=lease)
    return CudnnRNNBackpropOutputs(**outputs)
