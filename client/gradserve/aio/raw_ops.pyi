# Made by deploy/generate_face_types.py; do not edit.

import numpy as np
from collections.abc import Sequence
from typing import Any, Literal, overload
from numpy.typing import NDArray
from gradserve import AccumulatorHandle, AccumulatorLike, ArrayLike, CudnnRNNBackpropOutputs, CudnnRNNOutputs, CudnnRNNParamsToCanonicalOutputs, CudnnRNNV3Outputs, DTypeLike, FusedBatchNormGradOutputs, FusedBatchNormGradV3Outputs, FusedBatchNormOutputs, FusedBatchNormV3Outputs, GRUBlockCellAllGradOutputs, GRUBlockCellGradOutputs, GRUBlockCellOutputs, LayerNormGradOutputs, LayerNormOutputs, Shape, SparseAccumulatorTakeGradientOutputs, Tensor, TensorHandle, TensorLike
from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.face import AsyncFace

class RawOps(AsyncFace[RawOpsCalls]):
    async def AccumulatorApplyGradient(self, *, handle: AccumulatorLike, local_step: ArrayLike, gradient: TensorLike, worker_id: str = '', request_id: int | None = None, name: str | None = None) -> None:
        """Adds a gradient to the round, or drops it if `local_step` is smaller than the accumulator's step.

        Never waits for other workers. Every call counts once, even if the client has to send it again.
        Use `ConditionalAccumulator.apply_grad` to know whether the gradient was dropped.

        Args:
            handle: The handle of a dense accumulator, or the accumulator itself.
            local_step: The step at which the gradient was computed: int64, a scalar.
            gradient: The gradient, of the accumulator's dtype and shape, or the handle of such a tensor on the server,
                which stays there.
            worker_id: The sender's id, for diagnoses; needed by accumulators that are deterministic or count a worker
                once. Empty: no id, so that every call counts, as in TensorFlow.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again.
            name: Has no effect: TensorFlow's name of a node.

        Raises:
            InvalidArgumentError: An argument does not fit; nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
    async def AccumulatorNumAccumulated(self, *, handle: AccumulatorLike, name: str | None = None) -> np.int32:
        """Returns the number of gradients accepted since the last take.

        Args:
            handle: The handle of a dense or sparse accumulator, or the accumulator itself.
            name: Has no effect: TensorFlow's name of a node.

        Returns:
            The number: int32, a scalar.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
    async def AccumulatorSetGlobalStep(self, *, handle: AccumulatorLike, new_global_step: ArrayLike, name: str | None = None) -> None:
        """Sets the accumulator's step, also to a smaller one. Gradients in the round stay in it.

        Args:
            handle: The handle of a dense or sparse accumulator, or the accumulator itself.
            new_global_step: The new step: int64, a scalar.
            name: Has no effect: TensorFlow's name of a node.

        Raises:
            InvalidArgumentError: The step is not valid.
            NotFoundError: The accumulator was deleted.
        """
    async def AccumulatorTakeGradient(self, *, handle: AccumulatorLike, num_required: ArrayLike, dtype: DTypeLike, timeout: float | None = None, request_id: int | None = None, name: str | None = None) -> NDArray[Any]:
        """Waits for `num_required` gradients, ends the round and returns the average of all gradients in it.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out.

        Args:
            handle: The handle of a dense accumulator, or the accumulator itself.
            num_required: The number of gradients to wait for: int32, a scalar, at least 1.
            dtype: The accumulator's dtype.
            timeout: Seconds to wait; None for the client's timeout, math.inf for no limit.
            request_id: The `request_id` of a failed attempt's error, to get the same average.
            name: Has no effect: TensorFlow's name of a node.

        Returns:
            The mean or sum of the gradients, of their shape and of `dtype`.

        Raises:
            InvalidArgumentError: `num_required` is not positive, `dtype` is not the accumulator's, or `handle` is not
                valid.
            DeadlineExceededError: There were too few gradients in time. The message says how many, and from whom.
            AbortedError: The accumulator was deleted while the call waited.
        """
    async def ConditionalAccumulator(self, *, dtype: DTypeLike, shape: Shape | None, container: str | None = '', shared_name: str | None = '', reduction_type: str | None = 'MEAN', name: str | None = None) -> AccumulatorHandle:
        """Creates an accumulator of dense gradients, or finds the one with this shared name.

        `Client.conditional_accumulator` makes the same accumulators, with more options.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: The shape of every gradient; None is an unknown dimension, or an unknown shape. () is a scalar.
            container: The namespace of the shared name; empty for the default one.
            shared_name: The name by which other clients find it. Empty: it is private, and deleted with this client.
            reduction_type: "MEAN" or "SUM".
            name: The prefix of a private accumulator's name in lists; None for the name of the op.

        Returns:
            The handle of the accumulator, which other clients can use, too.

        Raises:
            InvalidArgumentError: An argument is not valid.
            AlreadyExistsError: The name is taken by an accumulator with other properties; the message says which.
                TensorFlow would share that one.
        """
    @overload
    async def CudnnRNN(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNOutputs[NDArray[Any]]:
        """Applies a recurrent network: CudnnRNNV3 with time first, whole sequences and without a projection.

        T is the number of steps, B of sequences, L of layers, D of directions and H of units; I is the size of the
        input. All floats have the dtype of `input`: float16, bfloat16, float32 or float64.

        Args:
            input: [T, B, I].
            input_h: [L * D, B, H]; layer * D + direction.
            input_c: [L * D, B, H]. For lstm; else not read.
            params: The parameter vector; see `CudnnRNNCanonicalToParamsV2`.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: The probability of dropping an element of a layer's input in training; the first layer drops none,
                so that an IgnoredArgumentWarning says so if there is no other.
            seed: The seed of the dropout, together with `seed2`.
            seed2: See `seed`.
            is_training: Whether to keep what the gradient needs, and to drop elements.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            output: [T, B, D * H'], or [B, T, D * H']; 0 beyond the end of a sequence.
            output_h: The shape of input_h: the state after the last step of each sequence.
            output_c: The shape of input_c for lstm, else a scalar.
            reserve_space: Opaque, for the gradient; a scalar when not training.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNN(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNOutputs[TensorHandle]: ...
    @overload
    async def CudnnRNN(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNOutputs[Tensor]: ...
    @overload
    async def CudnnRNNBackprop(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNBackpropOutputs[NDArray[Any]]:
        """Computes the gradients of CudnnRNN in training for the input, the states and the parameters.

        Args:
            input: As in the forward call.
            input_h: As in the forward call.
            input_c: As in the forward call. For lstm; else not read.
            params: As in the forward call.
            output: The forward call's output.
            output_h: The forward call's output_h.
            output_c: The forward call's output_c. For lstm; else not read.
            output_backprop: The shape of output: the gradient with respect to it.
            output_h_backprop: The shape of output_h: the gradient with respect to it.
            output_c_backprop: The shape of output_c: the gradient with respect to it. For lstm; else not read.
            reserve_space: The forward call's reserve_space; any other is refused.
            rnn_mode: As in the forward call.
            input_mode: As in the forward call.
            direction: As in the forward call.
            dropout: As in the forward call.
            seed: As in the forward call.
            seed2: As in the forward call.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            input_backprop: The shape of input; 0 beyond the end of a sequence.
            input_h_backprop: The shape of input_h.
            input_c_backprop: The shape of input_c for lstm, else a scalar.
            params_backprop: The shape of params.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNBackprop(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNBackpropOutputs[TensorHandle]: ...
    @overload
    async def CudnnRNNBackprop(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNBackpropOutputs[Tensor]: ...
    @overload
    async def CudnnRNNBackpropV2(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, host_reserved: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNBackpropOutputs[NDArray[Any]]:
        """Computes the gradients of CudnnRNNV2 in training for the input, the states and the parameters.

        Args:
            input: As in the forward call.
            input_h: As in the forward call.
            input_c: As in the forward call. For lstm; else not read.
            params: As in the forward call.
            output: The forward call's output.
            output_h: The forward call's output_h.
            output_c: The forward call's output_c. For lstm; else not read.
            output_backprop: The shape of output: the gradient with respect to it.
            output_h_backprop: The shape of output_h: the gradient with respect to it.
            output_c_backprop: The shape of output_c: the gradient with respect to it. For lstm; else not read.
            reserve_space: The forward call's reserve_space; any other is refused.
            host_reserved: The forward call's host_reserved; any other is refused.
            rnn_mode: As in the forward call.
            input_mode: As in the forward call.
            direction: As in the forward call.
            dropout: As in the forward call.
            seed: As in the forward call.
            seed2: As in the forward call.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            input_backprop: The shape of input; 0 beyond the end of a sequence.
            input_h_backprop: The shape of input_h.
            input_c_backprop: The shape of input_c for lstm, else a scalar.
            params_backprop: The shape of params.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNBackpropV2(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, host_reserved: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNBackpropOutputs[TensorHandle]: ...
    @overload
    async def CudnnRNNBackpropV2(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, host_reserved: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNBackpropOutputs[Tensor]: ...
    @overload
    async def CudnnRNNBackpropV3(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, sequence_lengths: TensorLike | None = None, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, host_reserved: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, time_major: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNBackpropOutputs[NDArray[Any]]:
        """Computes the gradients of CudnnRNNV3 in training for the input, the states and the parameters.

        Args:
            input: As in the forward call.
            input_h: As in the forward call.
            input_c: As in the forward call. For lstm; else not read.
            params: As in the forward call.
            sequence_lengths: As in the forward call.
            output: The forward call's output.
            output_h: The forward call's output_h.
            output_c: The forward call's output_c. For lstm; else not read.
            output_backprop: The shape of output: the gradient with respect to it. Not read beyond the end of a
                sequence.
            output_h_backprop: The shape of output_h: the gradient with respect to it.
            output_c_backprop: The shape of output_c: the gradient with respect to it. For lstm; else not read.
            reserve_space: The forward call's reserve_space; any other is refused.
            host_reserved: The forward call's host_reserved; any other is refused.
            rnn_mode: As in the forward call.
            input_mode: As in the forward call.
            direction: As in the forward call.
            dropout: As in the forward call.
            seed: As in the forward call.
            seed2: As in the forward call.
            num_proj: As in the forward call.
            time_major: As in the forward call.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            input_backprop: The shape of input; 0 beyond the end of a sequence.
            input_h_backprop: The shape of input_h.
            input_c_backprop: The shape of input_c for lstm, else a scalar.
            params_backprop: The shape of params.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNBackpropV3(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, sequence_lengths: TensorLike | None = None, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, host_reserved: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, time_major: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNBackpropOutputs[TensorHandle]: ...
    @overload
    async def CudnnRNNBackpropV3(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, sequence_lengths: TensorLike | None = None, output: TensorLike, output_h: TensorLike, output_c: TensorLike | None = None, output_backprop: TensorLike, output_h_backprop: TensorLike, output_c_backprop: TensorLike | None = None, reserve_space: TensorLike, host_reserved: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, time_major: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNBackpropOutputs[Tensor]: ...
    @overload
    async def CudnnRNNCanonicalToParams(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, weights: Sequence[TensorLike], biases: Sequence[TensorLike], rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> NDArray[Any]:
        """Makes the parameter vector of a network: CudnnRNNCanonicalToParamsV2 without a projection.

        G is the number of gates, D of directions and H of units; H' is the size of the hidden state. For each layer and
        direction there are the matrices W of all gates, each [H, size of the layer's input], R of all gates, each [H,
        H'], and with a projection its matrix, [num_proj, H]; and the biases bW of all gates and bR of all gates, each
        [H]. Gates are in the order input, forget, new memory, output (lstm); reset, update, new memory (gru). With
        skip_input the matrices W of the first layer have no columns: [H, 0]. Each may have any other shape with as many
        elements, such as flat: the elements are read row by row.

        Args:
            num_layers: L, a scalar.
            num_units: H, a scalar.
            input_size: I, a scalar.
            weights: The matrices.
            biases: The biases.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: Has no effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the output on the server and return its handle.
            lease: Seconds that it lives there without use; None for the server's default.

        Returns:
            The parameter vector.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNCanonicalToParams(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, weights: Sequence[TensorLike], biases: Sequence[TensorLike], rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[True], lease: float | None = None) -> TensorHandle: ...
    @overload
    async def CudnnRNNCanonicalToParams(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, weights: Sequence[TensorLike], biases: Sequence[TensorLike], rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: bool = False, lease: float | None = None) -> Tensor: ...
    @overload
    async def CudnnRNNCanonicalToParamsV2(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, weights: Sequence[TensorLike], biases: Sequence[TensorLike], rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> NDArray[Any]:
        """Makes the parameter vector of a network from its matrices and biases.

        G is the number of gates, D of directions and H of units; H' is the size of the hidden state. For each layer and
        direction there are the matrices W of all gates, each [H, size of the layer's input], R of all gates, each [H,
        H'], and with a projection its matrix, [num_proj, H]; and the biases bW of all gates and bR of all gates, each
        [H]. Gates are in the order input, forget, new memory, output (lstm); reset, update, new memory (gru). With
        skip_input the matrices W of the first layer have no columns: [H, 0]. Each may have any other shape with as many
        elements, such as flat: the elements are read row by row.

        Args:
            num_layers: L, a scalar.
            num_units: H, a scalar.
            input_size: I, a scalar.
            weights: The matrices.
            biases: The biases.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: Has no effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the output on the server and return its handle.
            lease: Seconds that it lives there without use; None for the server's default.

        Returns:
            The parameter vector.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNCanonicalToParamsV2(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, weights: Sequence[TensorLike], biases: Sequence[TensorLike], rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: Literal[True], lease: float | None = None) -> TensorHandle: ...
    @overload
    async def CudnnRNNCanonicalToParamsV2(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, weights: Sequence[TensorLike], biases: Sequence[TensorLike], rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: bool = False, lease: float | None = None) -> Tensor: ...
    @overload
    async def CudnnRNNParamsSize(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, T: DTypeLike | None = 'float32', S: DTypeLike | None = 'int32', rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> NDArray[Any]:
        """Returns the length of the parameter vector of a network.

        Args:
            num_layers: L, a scalar.
            num_units: H, a scalar.
            input_size: I, a scalar.
            T: The dtype of the parameters: float16, bfloat16, float32 or float64. The size does not depend on it.
            S: The dtype of the size: int32 or int64.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: Has no effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the output on the server and return its handle.
            lease: Seconds that it lives there without use; None for the server's default.

        Returns:
            S, shape [1].

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNParamsSize(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, T: DTypeLike | None = 'float32', S: DTypeLike | None = 'int32', rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: Literal[True], lease: float | None = None) -> TensorHandle: ...
    @overload
    async def CudnnRNNParamsSize(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, T: DTypeLike | None = 'float32', S: DTypeLike | None = 'int32', rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: bool = False, lease: float | None = None) -> Tensor: ...
    @overload
    async def CudnnRNNParamsToCanonical(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, params: TensorLike, num_params: int, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNParamsToCanonicalOutputs[NDArray[Any]]:
        """Splits the parameter vector of a network: CudnnRNNParamsToCanonicalV2 without a projection.

        Args:
            num_layers: L, a scalar.
            num_units: H, a scalar.
            input_size: I, a scalar.
            params: The parameter vector.
            num_params: The number of matrices, and of biases.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: Has no effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            weights: The list of matrices.
            biases: The list of biases.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNParamsToCanonical(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, params: TensorLike, num_params: int, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNParamsToCanonicalOutputs[TensorHandle]: ...
    @overload
    async def CudnnRNNParamsToCanonical(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, params: TensorLike, num_params: int, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNParamsToCanonicalOutputs[Tensor]: ...
    @overload
    async def CudnnRNNParamsToCanonicalV2(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, params: TensorLike, num_params_weights: int, num_params_biases: int, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNParamsToCanonicalOutputs[NDArray[Any]]:
        """Splits the parameter vector of a network; the reverse of `CudnnRNNCanonicalToParamsV2`.

        Args:
            num_layers: L, a scalar.
            num_units: H, a scalar.
            input_size: I, a scalar.
            params: The parameter vector.
            num_params_weights: The number of matrices.
            num_params_biases: The number of biases.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: Has no effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            weights: The list of matrices.
            biases: The list of biases.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNParamsToCanonicalV2(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, params: TensorLike, num_params_weights: int, num_params_biases: int, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNParamsToCanonicalOutputs[TensorHandle]: ...
    @overload
    async def CudnnRNNParamsToCanonicalV2(self, *, num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, params: TensorLike, num_params_weights: int, num_params_biases: int, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0.0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNParamsToCanonicalOutputs[Tensor]: ...
    @overload
    async def CudnnRNNV2(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNV3Outputs[NDArray[Any]]:
        """Applies a recurrent network: CudnnRNNV3 with time first, whole sequences and without a projection.

        T is the number of steps, B of sequences, L of layers, D of directions and H of units; I is the size of the
        input. All floats have the dtype of `input`: float16, bfloat16, float32 or float64.

        Args:
            input: [T, B, I].
            input_h: [L * D, B, H]; layer * D + direction.
            input_c: [L * D, B, H]. For lstm; else not read.
            params: The parameter vector; see `CudnnRNNCanonicalToParamsV2`.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: The probability of dropping an element of a layer's input in training; the first layer drops none,
                so that an IgnoredArgumentWarning says so if there is no other.
            seed: The seed of the dropout, together with `seed2`.
            seed2: See `seed`.
            is_training: Whether to keep what the gradient needs, and to drop elements.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            output: [T, B, D * H'], or [B, T, D * H']; 0 beyond the end of a sequence.
            output_h: The shape of input_h: the state after the last step of each sequence.
            output_c: The shape of input_c for lstm, else a scalar.
            reserve_space: Opaque, for the gradient; a scalar when not training.
            host_reserved: Opaque, for the gradient; a scalar when not training.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNV2(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNV3Outputs[TensorHandle]: ...
    @overload
    async def CudnnRNNV2(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNV3Outputs[Tensor]: ...
    @overload
    async def CudnnRNNV3(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, sequence_lengths: TensorLike | None = None, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, is_training: bool | None = True, time_major: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> CudnnRNNV3Outputs[NDArray[Any]]:
        """Applies a recurrent network of L layers and D directions to B sequences of up to T steps.

        H is the number of units, H' the size of the hidden state: num_proj with a projection, else H. All
        floats have the dtype of `input`: float16, bfloat16, float32 or float64.

        Args:
            input: [T, B, I], or [B, T, I] if not `time_major`.
            input_h: [L * D, B, H'], or [B, L * D, H'] if not `time_major`; layer * D + direction.
            input_c: [L * D, B, H], or [B, L * D, H] if not `time_major`. For lstm; else not read.
            params: The parameter vector; see `CudnnRNNCanonicalToParamsV2`.
            sequence_lengths: Integers, [B], each from 1 to T; None: all are T.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: The probability of dropping an element of a layer's input in training; the first layer drops none,
                so that an IgnoredArgumentWarning says so if there is no other.
            seed: The seed of the dropout, together with `seed2`.
            seed2: See `seed`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            is_training: Whether to keep what the gradient needs, and to drop elements.
            time_major: Whether time is the first dimension; otherwise the batch is.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            output: [T, B, D * H'], or [B, T, D * H']; 0 beyond the end of a sequence.
            output_h: The shape of input_h: the state after the last step of each sequence.
            output_c: The shape of input_c for lstm, else a scalar.
            reserve_space: Opaque, for the gradient; a scalar when not training.
            host_reserved: Opaque, for the gradient; a scalar when not training.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def CudnnRNNV3(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, sequence_lengths: TensorLike | None = None, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, is_training: bool | None = True, time_major: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> CudnnRNNV3Outputs[TensorHandle]: ...
    @overload
    async def CudnnRNNV3(self, *, input: TensorLike, input_h: TensorLike, input_c: TensorLike | None = None, params: TensorLike, sequence_lengths: TensorLike | None = None, rnn_mode: str | None = 'lstm', input_mode: str | None = 'linear_input', direction: str | None = 'unidirectional', dropout: float | None = 0, seed: int | None = 0, seed2: int | None = 0, num_proj: int | None = 0, is_training: bool | None = True, time_major: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> CudnnRNNV3Outputs[Tensor]: ...
    async def DestroyResourceOp(self, *, resource: AccumulatorLike, ignore_lookup_error: bool | None = True, name: str | None = None) -> None:
        """Deletes an accumulator; calls that wait on it end with AbortedError.

        Args:
            resource: The handle of a dense or sparse accumulator, or the accumulator itself.
            ignore_lookup_error: Whether to ignore that the accumulator does not exist.
            name: Has no effect: TensorFlow's name of a node.

        Raises:
            NotFoundError: The accumulator does not exist.
        """
    @overload
    async def FusedBatchNorm(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> FusedBatchNormOutputs[NDArray[Any]]:
        """Normalises a batch of images: FusedBatchNormV3 for float32 and the data formats NHWC and NCHW.

        In the following, C is the number of channels, M the number of elements in a channel, T the dtype of x, and U
        float32, or float64 if T is.

        Args:
            x: float32, of rank 4.
            scale: U, shape [C].
            offset: U, shape [C].
            mean: U, shape [C]: the population mean, or in training the moving mean. Not read, and of any length (such
                as 0), in training with an exponential_avg_factor of 1.
            variance: Like `mean`, for the variance.
            epsilon: Added to the variance.
            exponential_avg_factor: f: the weight of the moments of x in batch_mean and batch_variance, in training.
            data_format: "NHWC" or "NCHW".
            is_training: Whether to normalise by the moments of x, or by `mean` and `variance`.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            y: T, the shape of x.
            batch_mean: U, shape [C]: in training (1 - f) mean + f mu, with mu the mean of x; else `mean`.
            batch_variance: U, shape [C]: in training (1 - f) variance + f var M / max(M - 1, 1), with var the
                population variance of x; else `variance`.
            reserve_space_1: U, shape [C]: in training mu, else 0.
            reserve_space_2: U, shape [C]: in training var, else 0.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def FusedBatchNorm(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> FusedBatchNormOutputs[TensorHandle]: ...
    @overload
    async def FusedBatchNorm(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> FusedBatchNormOutputs[Tensor]: ...
    @overload
    async def FusedBatchNormGrad(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> FusedBatchNormGradOutputs[NDArray[Any]]:
        """Computes the gradients of FusedBatchNorm: FusedBatchNormGradV3 for float32 and the data formats NHWC and NCHW.

        C, T and U are as in `FusedBatchNormV3`.

        Args:
            y_backprop: T, the shape of x: the gradient with respect to y.
            x: float32, of rank 4.
            scale: U, shape [C].
            reserve_space_1: U, shape [C]: in training the forward call's reserve_space_1, else its input `mean`.
            reserve_space_2: U, shape [C]: in training the forward call's reserve_space_2, else its input `variance`.
            epsilon: As in the forward call.
            data_format: As in the forward call.
            is_training: As in the forward call.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            x_backprop: T, the shape of x.
            scale_backprop: U, shape [C].
            offset_backprop: U, shape [C].
            reserve_space_3: U, shape [0]: a placeholder.
            reserve_space_4: U, shape [0]: a placeholder.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def FusedBatchNormGrad(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> FusedBatchNormGradOutputs[TensorHandle]: ...
    @overload
    async def FusedBatchNormGrad(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> FusedBatchNormGradOutputs[Tensor]: ...
    @overload
    async def FusedBatchNormGradV2(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> FusedBatchNormGradOutputs[NDArray[Any]]:
        """Computes the gradients of FusedBatchNormV2: FusedBatchNormGradV3 for the data formats NHWC and NCHW.

        C, T and U are as in `FusedBatchNormV3`.

        Args:
            y_backprop: T, the shape of x: the gradient with respect to y.
            x: float16, bfloat16, float32 or float64, of rank 4.
            scale: U, shape [C].
            reserve_space_1: U, shape [C]: in training the forward call's reserve_space_1, else its input `mean`.
            reserve_space_2: U, shape [C]: in training the forward call's reserve_space_2, else its input `variance`.
            epsilon: As in the forward call.
            data_format: As in the forward call.
            is_training: As in the forward call.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            x_backprop: T, the shape of x.
            scale_backprop: U, shape [C].
            offset_backprop: U, shape [C].
            reserve_space_3: U, shape [0]: a placeholder.
            reserve_space_4: U, shape [0]: a placeholder.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def FusedBatchNormGradV2(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> FusedBatchNormGradOutputs[TensorHandle]: ...
    @overload
    async def FusedBatchNormGradV2(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> FusedBatchNormGradOutputs[Tensor]: ...
    @overload
    async def FusedBatchNormGradV3(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, reserve_space_3: TensorLike | None = None, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> FusedBatchNormGradV3Outputs[NDArray[Any]]:
        """Computes the gradients of FusedBatchNormV3 with respect to x, scale and offset.

        C, T and U are as in `FusedBatchNormV3`.

        Args:
            y_backprop: T, the shape of x: the gradient with respect to y.
            x: float16, bfloat16, float32 or float64, of rank 4, or 5 for the formats with a D.
            scale: U, shape [C].
            reserve_space_1: U, shape [C]: in training the forward call's reserve_space_1, else its input `mean`.
            reserve_space_2: U, shape [C]: in training the forward call's reserve_space_2, else its input `variance`.
            reserve_space_3: The forward call's reserve_space_3; not read.
            epsilon: As in the forward call.
            data_format: As in the forward call.
            is_training: As in the forward call.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            x_backprop: T, the shape of x.
            scale_backprop: U, shape [C].
            offset_backprop: U, shape [C].
            reserve_space_4: U, shape [0]: a placeholder.
            reserve_space_5: U, shape [0]: a placeholder.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def FusedBatchNormGradV3(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, reserve_space_3: TensorLike | None = None, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> FusedBatchNormGradV3Outputs[TensorHandle]: ...
    @overload
    async def FusedBatchNormGradV3(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike, reserve_space_3: TensorLike | None = None, epsilon: float | None = 0.0001, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> FusedBatchNormGradV3Outputs[Tensor]: ...
    @overload
    async def FusedBatchNormV2(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> FusedBatchNormOutputs[NDArray[Any]]:
        """Normalises a batch of images: FusedBatchNormV3 for the data formats NHWC and NCHW.

        In the following, C is the number of channels, M the number of elements in a channel, T the dtype of x, and U
        float32, or float64 if T is.

        Args:
            x: float16, bfloat16, float32 or float64, of rank 4.
            scale: U, shape [C].
            offset: U, shape [C].
            mean: U, shape [C]: the population mean, or in training the moving mean. Not read, and of any length (such
                as 0), in training with an exponential_avg_factor of 1.
            variance: Like `mean`, for the variance.
            epsilon: Added to the variance.
            exponential_avg_factor: f: the weight of the moments of x in batch_mean and batch_variance, in training.
            data_format: "NHWC" or "NCHW".
            is_training: Whether to normalise by the moments of x, or by `mean` and `variance`.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            y: T, the shape of x.
            batch_mean: U, shape [C]: in training (1 - f) mean + f mu, with mu the mean of x; else `mean`.
            batch_variance: U, shape [C]: in training (1 - f) variance + f var M / max(M - 1, 1), with var the
                population variance of x; else `variance`.
            reserve_space_1: U, shape [C]: in training mu, else 0.
            reserve_space_2: U, shape [C]: in training var, else 0.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def FusedBatchNormV2(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> FusedBatchNormOutputs[TensorHandle]: ...
    @overload
    async def FusedBatchNormV2(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> FusedBatchNormOutputs[Tensor]: ...
    @overload
    async def FusedBatchNormV3(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> FusedBatchNormV3Outputs[NDArray[Any]]:
        """Normalises a batch of images or volumes over all axes but the channels.

        In the following, C is the number of channels, M the number of elements in a channel, T the dtype of x, and U
        float32, or float64 if T is.

        Args:
            x: float16, bfloat16, float32 or float64, of rank 4, or 5 for the formats with a D.
            scale: U, shape [C].
            offset: U, shape [C].
            mean: U, shape [C]: the population mean, or in training the moving mean. Not read, and of any length (such
                as 0), in training with an exponential_avg_factor of 1.
            variance: Like `mean`, for the variance.
            epsilon: Added to the variance.
            exponential_avg_factor: f: the weight of the moments of x in batch_mean and batch_variance, in training.
            data_format: "NHWC", "NCHW", "NDHWC" or "NCDHW".
            is_training: Whether to normalise by the moments of x, or by `mean` and `variance`.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            y: T, the shape of x.
            batch_mean: U, shape [C]: in training (1 - f) mean + f mu, with mu the mean of x; else `mean`.
            batch_variance: U, shape [C]: in training (1 - f) variance + f var M / max(M - 1, 1), with var the
                population variance of x; else `variance`.
            reserve_space_1: U, shape [C]: in training mu, else 0.
            reserve_space_2: U, shape [C]: in training var, else 0.
            reserve_space_3: U, a scalar: 0.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def FusedBatchNormV3(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: Literal[True], lease: float | None = None) -> FusedBatchNormV3Outputs[TensorHandle]: ...
    @overload
    async def FusedBatchNormV3(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, mean: TensorLike, variance: TensorLike, epsilon: float | None = 0.0001, exponential_avg_factor: float | None = 1, data_format: str | None = 'NHWC', is_training: bool | None = True, name: str | None = None, keep: bool = False, lease: float | None = None) -> FusedBatchNormV3Outputs[Tensor]: ...
    @overload
    async def GRUBlockCell(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> GRUBlockCellOutputs[NDArray[Any]]:
        """Computes one step of a GRU for a batch.

            [r, u] = sigmoid([x, h_prev] . w_ru + b_ru)
            c      = tanh([x, h_prev r] . w_c + b_c)
            h      = u h_prev + (1 - u) c

        In the following, B is the batch, I the size of the input, H the size of the cell, and T the dtype of x and of
        all other tensors: float16, bfloat16, float32 or float64.

        Args:
            x: T, shape [B, I].
            h_prev: T, shape [B, H]: the previous state.
            w_ru: T, shape [I + H, 2H]: rows for x, then for h_prev; columns for r, then for u.
            w_c: T, shape [I + H, H]: rows as in w_ru.
            b_ru: T, shape [2H]: for r, then for u.
            b_c: T, shape [H].
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            r: T, shape [B, H]: the reset gate.
            u: T, shape [B, H]: the update gate.
            c: T, shape [B, H]: the candidate state.
            h: T, shape [B, H]: the new state.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def GRUBlockCell(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, name: str | None = None, keep: Literal[True], lease: float | None = None) -> GRUBlockCellOutputs[TensorHandle]: ...
    @overload
    async def GRUBlockCell(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, name: str | None = None, keep: bool = False, lease: float | None = None) -> GRUBlockCellOutputs[Tensor]: ...
    @overload
    async def GRUBlockCellGrad(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, r: TensorLike, u: TensorLike, c: TensorLike, d_h: TensorLike, weight_gradients: Literal[False] | None = False, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> GRUBlockCellGradOutputs[NDArray[Any]]:
        """Computes the gradients of GRUBlockCell.

        B, I, H and T are as in `GRUBlockCell`.

        Args:
            x: As in the forward call.
            h_prev: As in the forward call.
            w_ru: As in the forward call.
            w_c: As in the forward call.
            b_ru: As in the forward call; only its shape counts.
            b_c: As in the forward call; only its shape counts.
            r: T, shape [B, H]: the forward call's r.
            u: T, shape [B, H]: the forward call's u.
            c: T, shape [B, H]: the forward call's c.
            d_h: T, shape [B, H]: the gradient with respect to h.
            weight_gradients: Whether to compute the last four outputs, which TensorFlow's op does not have.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            d_x: T, shape [B, I].
            d_h_prev: T, shape [B, H].
            d_c_bar: T, shape [B, H]: with respect to the argument of tanh.
            d_r_bar_u_bar: T, shape [B, 2H]: with respect to the argument of the sigmoid.
            d_w_ru: T, shape [I + H, 2H].
            d_w_c: T, shape [I + H, H].
            d_b_ru: T, shape [2H].
            d_b_c: T, shape [H].

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def GRUBlockCellGrad(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, r: TensorLike, u: TensorLike, c: TensorLike, d_h: TensorLike, weight_gradients: Literal[False] | None = False, name: str | None = None, keep: Literal[True], lease: float | None = None) -> GRUBlockCellGradOutputs[TensorHandle]: ...
    @overload
    async def GRUBlockCellGrad(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, r: TensorLike, u: TensorLike, c: TensorLike, d_h: TensorLike, weight_gradients: Literal[False] | None = False, name: str | None = None, keep: bool = False, lease: float | None = None) -> GRUBlockCellGradOutputs[Tensor]: ...
    @overload
    async def GRUBlockCellGrad(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, r: TensorLike, u: TensorLike, c: TensorLike, d_h: TensorLike, weight_gradients: Literal[True], name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> GRUBlockCellAllGradOutputs[NDArray[Any]]: ...
    @overload
    async def GRUBlockCellGrad(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, r: TensorLike, u: TensorLike, c: TensorLike, d_h: TensorLike, weight_gradients: Literal[True], name: str | None = None, keep: Literal[True], lease: float | None = None) -> GRUBlockCellAllGradOutputs[TensorHandle]: ...
    @overload
    async def GRUBlockCellGrad(self, *, x: TensorLike, h_prev: TensorLike, w_ru: TensorLike, w_c: TensorLike, b_ru: TensorLike, b_c: TensorLike, r: TensorLike, u: TensorLike, c: TensorLike, d_h: TensorLike, weight_gradients: Literal[True], name: str | None = None, keep: bool = False, lease: float | None = None) -> GRUBlockCellAllGradOutputs[Tensor]: ...
    @overload
    async def LayerNorm(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, epsilon: float | None = 1e-05, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> LayerNormOutputs[NDArray[Any]]:
        """Normalizes each group of elements of x, as PyTorch's native_layer_norm does.

        In the following, T is the dtype of x: float16, bfloat16, float32 or float64. U is float32, or float64 if T
        is. S is the shape of scale, with at least one dimension. A group is all elements of x with the same indices
        in the dimensions before S.

        Args:
            x: T, any shape that ends with S; the shape S itself makes one group.
            scale: U, shape S.
            offset: U, shape S.
            epsilon: Added to the variance.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            y: T, the shape of x: (x - mean) rstd scale + offset.
            mean: U, the shape of x without the dimensions of S.
            rstd: U, the shape of mean: 1 / sqrt(variance + epsilon), with the population variance.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def LayerNorm(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, epsilon: float | None = 1e-05, name: str | None = None, keep: Literal[True], lease: float | None = None) -> LayerNormOutputs[TensorHandle]: ...
    @overload
    async def LayerNorm(self, *, x: TensorLike, scale: TensorLike, offset: TensorLike, epsilon: float | None = 1e-05, name: str | None = None, keep: bool = False, lease: float | None = None) -> LayerNormOutputs[Tensor]: ...
    @overload
    async def LayerNormGrad(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, mean: TensorLike, rstd: TensorLike, name: str | None = None, keep: Literal[False] = False, lease: float | None = None) -> LayerNormGradOutputs[NDArray[Any]]:
        """Computes the gradients of LayerNorm with respect to x, scale and offset.

        T, U and S are as in `LayerNorm`.

        Args:
            y_backprop: T, the shape of x: the gradient with respect to y.
            x: T, as in the forward call.
            scale: U, shape S, as in the forward call.
            mean: U: the forward call's mean.
            rstd: U: the forward call's rstd.
            name: Has no effect: TensorFlow's name of a node.
            keep: Whether to leave the outputs on the server and return their handles.
            lease: Seconds that they live there without use; None for the server's default.

        Returns:
            x_backprop: T, the shape of x.
            scale_backprop: U, shape S.
            offset_backprop: U, shape S.

        Raises:
            InvalidArgumentError: An argument is not valid; `field` names it.
            NotFoundError: The tensor of a handle does not exist.
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
    @overload
    async def LayerNormGrad(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, mean: TensorLike, rstd: TensorLike, name: str | None = None, keep: Literal[True], lease: float | None = None) -> LayerNormGradOutputs[TensorHandle]: ...
    @overload
    async def LayerNormGrad(self, *, y_backprop: TensorLike, x: TensorLike, scale: TensorLike, mean: TensorLike, rstd: TensorLike, name: str | None = None, keep: bool = False, lease: float | None = None) -> LayerNormGradOutputs[Tensor]: ...
    async def ResourceAccumulatorApplyGradient(self, *, handle: AccumulatorLike, local_step: ArrayLike, gradient: TensorLike, worker_id: str = '', request_id: int | None = None, name: str | None = None) -> None:
        """Adds a gradient to the round, or drops it: AccumulatorApplyGradient.

        Never waits for other workers. Every call counts once, even if the client has to send it again.
        Use `ConditionalAccumulator.apply_grad` to know whether the gradient was dropped.

        Args:
            handle: The handle of a dense accumulator, or the accumulator itself.
            local_step: The step at which the gradient was computed: int64, a scalar.
            gradient: The gradient, of the accumulator's dtype and shape, or the handle of such a tensor on the server,
                which stays there.
            worker_id: The sender's id, for diagnoses; needed by accumulators that are deterministic or count a worker
                once. Empty: no id, so that every call counts, as in TensorFlow.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again.
            name: Has no effect: TensorFlow's name of a node.

        Raises:
            InvalidArgumentError: An argument does not fit; nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
    async def ResourceAccumulatorNumAccumulated(self, *, handle: AccumulatorLike, name: str | None = None) -> np.int32:
        """Returns the number of gradients accepted since the last take: AccumulatorNumAccumulated.

        Args:
            handle: The handle of a dense or sparse accumulator, or the accumulator itself.
            name: Has no effect: TensorFlow's name of a node.

        Returns:
            The number: int32, a scalar.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
    async def ResourceAccumulatorSetGlobalStep(self, *, handle: AccumulatorLike, new_global_step: ArrayLike, name: str | None = None) -> None:
        """Sets the step: AccumulatorSetGlobalStep.

        Args:
            handle: The handle of a dense or sparse accumulator, or the accumulator itself.
            new_global_step: The new step: int64, a scalar.
            name: Has no effect: TensorFlow's name of a node.

        Raises:
            InvalidArgumentError: The step is not valid.
            NotFoundError: The accumulator was deleted.
        """
    async def ResourceAccumulatorTakeGradient(self, *, handle: AccumulatorLike, num_required: ArrayLike, dtype: DTypeLike, timeout: float | None = None, request_id: int | None = None, name: str | None = None) -> NDArray[Any]:
        """Waits for `num_required` gradients and returns their average: AccumulatorTakeGradient.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out.

        Args:
            handle: The handle of a dense accumulator, or the accumulator itself.
            num_required: The number of gradients to wait for: int32, a scalar, at least 1.
            dtype: The accumulator's dtype.
            timeout: Seconds to wait; None for the client's timeout, math.inf for no limit.
            request_id: The `request_id` of a failed attempt's error, to get the same average.
            name: Has no effect: TensorFlow's name of a node.

        Returns:
            The mean or sum of the gradients, of their shape and of `dtype`.

        Raises:
            InvalidArgumentError: `num_required` is not positive, `dtype` is not the accumulator's, or `handle` is not
                valid.
            DeadlineExceededError: There were too few gradients in time. The message says how many, and from whom.
            AbortedError: The accumulator was deleted while the call waited.
        """
    async def ResourceConditionalAccumulator(self, *, dtype: DTypeLike, shape: Shape | None, container: str | None = '', shared_name: str | None = '', reduction_type: str | None = 'MEAN', name: str | None = None) -> AccumulatorHandle:
        """Creates an accumulator of dense gradients, or finds the one with this shared name: ConditionalAccumulator.

        `Client.conditional_accumulator` makes the same accumulators, with more options.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: The shape of every gradient; None is an unknown dimension, or an unknown shape. () is a scalar.
            container: The namespace of the shared name; empty for the default one.
            shared_name: The name by which other clients find it. Empty: it is private, and deleted with this client.
            reduction_type: "MEAN" or "SUM".
            name: The prefix of a private accumulator's name in lists; None for the name of the op.

        Returns:
            The handle of the accumulator, which other clients can use, too.

        Raises:
            InvalidArgumentError: An argument is not valid.
            AlreadyExistsError: The name is taken by an accumulator with other properties; the message says which.
                TensorFlow would share that one.
        """
    async def SparseAccumulatorApplyGradient(self, *, handle: AccumulatorLike, local_step: ArrayLike, gradient_indices: ArrayLike, gradient_values: ArrayLike, gradient_shape: ArrayLike, has_known_shape: bool, worker_id: str = '', request_id: int | None = None, name: str | None = None) -> None:
        """Adds rows to the round, as AccumulatorApplyGradient adds a dense gradient.

        Args:
            handle: The handle of a sparse accumulator, or the accumulator itself.
            local_step: The step at which the gradient was computed: int64, a scalar.
            gradient_indices: The numbers of the rows: int64, shape [n]. Ascending lists merge fastest; equal indices in
                unsorted lists may stay separate rows.
            gradient_values: The rows: the accumulator's dtype, shape [n, ...].
            gradient_shape: The shape of the whole tensor, checked against the accumulator's: int64, a vector.
            has_known_shape: Whether gradient_shape counts; otherwise it is not read.
            worker_id: The sender's id; see `AccumulatorApplyGradient`.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again.
            name: Has no effect: TensorFlow's name of a node.

        Raises:
            InvalidArgumentError: An argument does not fit; nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
    async def SparseAccumulatorTakeGradient(self, *, handle: AccumulatorLike, num_required: ArrayLike, dtype: DTypeLike, timeout: float | None = None, request_id: int | None = None, name: str | None = None) -> SparseAccumulatorTakeGradientOutputs:
        """Waits for `num_required` gradients, ends the round and returns the average of all gradients in it.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out. A mean divides each row by the number of gradients that have this row.

        Args:
            handle: The handle of a sparse accumulator, or the accumulator itself.
            num_required: The number of gradients to wait for: int32, a scalar, at least 1.
            dtype: The accumulator's dtype.
            timeout: Seconds to wait; None for the client's timeout, math.inf for no limit.
            request_id: The `request_id` of a failed attempt's error, to get the same average.
            name: Has no effect: TensorFlow's name of a node.

        Returns:
            indices: int64, shape [n]: the numbers of the rows.
            values: `dtype`, shape [n, ...]: the rows.
            shape: int64, a vector: the shape of the whole tensor, -1 where unknown.

        Raises:
            InvalidArgumentError: `num_required` is not positive, `dtype` is not the accumulator's, or `handle` is not
                valid.
            DeadlineExceededError: There were too few gradients in time. The message says how many, and from whom.
            AbortedError: The accumulator was deleted while the call waited.
        """
    async def SparseConditionalAccumulator(self, *, dtype: DTypeLike, shape: Shape | None, container: str | None = '', shared_name: str | None = '', reduction_type: str | None = 'MEAN', name: str | None = None) -> AccumulatorHandle:
        """Creates an accumulator of sparse gradients, or finds the one with this shared name.

        `Client.sparse_conditional_accumulator` makes the same accumulators, with more options.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: The shape of the whole tensor; None is an unknown dimension, or an unknown shape.
            container: The namespace of the shared name; empty for the default one.
            shared_name: The name by which other clients find it. Empty: it is private, and deleted with this client.
            reduction_type: "MEAN" or "SUM".
            name: The prefix of a private accumulator's name in lists; None for the name of the op.

        Returns:
            The handle of the accumulator, which other clients can use, too.

        Raises:
            InvalidArgumentError: An argument is not valid.
            AlreadyExistsError: The name is taken by an accumulator with other properties; the message says which.
                TensorFlow would share that one.
        """
