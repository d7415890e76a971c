"""The ops on the parameters of CudnnRNN, in TensorFlow's two versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradserve.array_like import ArrayLike, DTypeLike
from gradserve.batch_norm_results import IgnoredArgument
from gradserve.calls.exchange import Operation
from gradserve.calls.ignored_arguments import warn_of_ignored
from gradserve.calls.op_wire import as_op_input, run_op
from gradserve.calls.tensors.operations import OpInputs
from gradserve.conversion.argument import Argument, described
from gradserve.conversion.arrays import as_array
from gradserve.conversion.dtypes import as_dtype
from gradserve.conversion.plain import INT32, as_integer, as_list, as_number
from gradserve.errors import InvalidArgumentError
from gradserve.op_outputs import CudnnRNNParamsToCanonicalOutputs
from gradserve.results import Tensor, TensorLike
from gradserve.v1 import cudnn_rnn_messages_pb2 as messages_pb2

_FLOAT32 = np.dtype(np.float32)
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class CudnnRnnParamsCalls:
    """The ops on the parameters of CudnnRNN."""

    def CudnnRNNParamsSize(
        self,
        *,
        num_layers: ArrayLike,
        num_units: ArrayLike,
        input_size: ArrayLike,
        T: DTypeLike = "float32",  # noqa: N803  (TensorFlow's name)
        S: DTypeLike = "int32",  # noqa: N803
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0.0,
        seed: int = 0,
        seed2: int = 0,
        num_proj: int = 0,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[Tensor]:
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
            dropout: Without effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            keep: Leave the output on the server and return its handle.
            lease: For how many seconds it lives there without use; None for the server's default.

        Returns:
            S, shape [1].

        Raises:
            InvalidArgumentError: There is no such network; `field` says why.
        """
        _check_float(T)
        _warn_of_dropout("CudnnRNNParamsSize", dropout, seed, seed2)
        network = _network(num_layers, num_units, input_size, rnn_mode, input_mode, direction)
        attributes = {**network, "num_proj": num_proj, "s": as_dtype(S, Argument("S")).name}
        request = messages_pb2.CudnnRNNParamsSizeRequest
        outputs = yield from run_op("CudnnRNNParamsSize", request, {}, attributes, keep=keep, lease=lease)
        params_size: Tensor = outputs["params_size"]
        return params_size

    def CudnnRNNCanonicalToParams(
        self,
        *,
        num_layers: ArrayLike,
        num_units: ArrayLike,
        input_size: ArrayLike,
        weights: Sequence[TensorLike],
        biases: Sequence[TensorLike],
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0.0,
        seed: int = 0,
        seed2: int = 0,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[Tensor]:
        """Makes a parameter vector: CudnnRNNCanonicalToParamsV2 without a projection."""
        _warn_of_dropout("CudnnRNNCanonicalToParams", dropout, seed, seed2)
        network = _network(num_layers, num_units, input_size, rnn_mode, input_mode, direction)
        return (yield from _canonical_to_params(weights, biases, network, keep, lease))

    def CudnnRNNCanonicalToParamsV2(
        self,
        *,
        num_layers: ArrayLike,
        num_units: ArrayLike,
        input_size: ArrayLike,
        weights: Sequence[TensorLike],
        biases: Sequence[TensorLike],
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0.0,
        seed: int = 0,
        seed2: int = 0,
        num_proj: int = 0,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[Tensor]:
        """Makes the parameter vector of a network of its matrices and biases.

        With G gates, D directions, H units, and H' the size of the hidden state: for each layer and direction come the
        matrices W of all gates, each [H, size of the layer's input], R of all gates, each [H, H'], and the projection,
        [num_proj, H], where there is one; and the biases bW of all gates and bR of all gates, each [H]. Gates in the
        order input, forget, new memory, output (lstm); reset, update, new memory (gru). With skip_input the matrices W
        of the first layer have no columns: [H, 0]. Each may come in any other shape of as many elements, such as flat:
        the elements are taken row by row.

        Args:
            num_layers: L, a scalar.
            num_units: H, a scalar.
            input_size: I, a scalar.
            weights: The matrices.
            biases: The biases.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: Without effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            keep: Leave the output on the server and return its handle.
            lease: For how many seconds it lives there without use; None for the server's default.

        Returns:
            The parameter vector.

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
        """
        _warn_of_dropout("CudnnRNNCanonicalToParamsV2", dropout, seed, seed2)
        network = _network(num_layers, num_units, input_size, rnn_mode, input_mode, direction)
        return (yield from _canonical_to_params(weights, biases, {**network, "num_proj": num_proj}, keep, lease))

    def CudnnRNNParamsToCanonical(
        self,
        *,
        num_layers: ArrayLike,
        num_units: ArrayLike,
        input_size: ArrayLike,
        params: TensorLike,
        num_params: int,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0.0,
        seed: int = 0,
        seed2: int = 0,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNParamsToCanonicalOutputs[Tensor]]:
        """Takes a parameter vector apart: CudnnRNNParamsToCanonicalV2 without a projection.

        Args:
            num_params: How many matrices there are, and how many biases.
        """
        _warn_of_dropout("CudnnRNNParamsToCanonical", dropout, seed, seed2)
        network = _network(num_layers, num_units, input_size, rnn_mode, input_mode, direction)
        number = as_integer(num_params, Argument("num_params"), INT32)
        counts = {"num_params_weights": number, "num_params_biases": number}
        names = dict.fromkeys(counts, "num_params")
        return (yield from _params_to_canonical(params, {**network, **counts}, keep, lease, names))

    def CudnnRNNParamsToCanonicalV2(
        self,
        *,
        num_layers: ArrayLike,
        num_units: ArrayLike,
        input_size: ArrayLike,
        params: TensorLike,
        num_params_weights: int,
        num_params_biases: int,
        rnn_mode: str = "lstm",
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dropout: float = 0.0,
        seed: int = 0,
        seed2: int = 0,
        num_proj: int = 0,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[CudnnRNNParamsToCanonicalOutputs[Tensor]]:
        """Takes the parameter vector of a network apart; the reverse of `CudnnRNNCanonicalToParamsV2`.

        Args:
            num_layers: L, a scalar.
            num_units: H, a scalar.
            input_size: I, a scalar.
            params: The parameter vector.
            num_params_weights: How many matrices there are.
            num_params_biases: How many biases there are.
            rnn_mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
            input_mode: "linear_input", "skip_input" or "auto_select".
            direction: "unidirectional" or "bidirectional".
            dropout: Without effect; an IgnoredArgumentWarning says so if it is not 0.
            seed: As `dropout`.
            seed2: As `dropout`.
            num_proj: The size of the projection of the hidden state, for lstm; 0 for none.
            keep: Leave the outputs on the server and return their handles.
            lease: For how many seconds they live there without use; None for the server's default.

        Returns:
            weights: The matrices, a list.
            biases: The biases, a list.

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
        """
        _warn_of_dropout("CudnnRNNParamsToCanonicalV2", dropout, seed, seed2)
        network = _network(num_layers, num_units, input_size, rnn_mode, input_mode, direction)
        counts = {"num_params_weights": num_params_weights, "num_params_biases": num_params_biases}
        return (yield from _params_to_canonical(params, {**network, **counts, "num_proj": num_proj}, keep, lease))


def _canonical_to_params(
    weights: Sequence[TensorLike],
    biases: Sequence[TensorLike],
    attributes: Mapping[str, Any],
    keep: bool,
    lease: float | None,
) -> Operation[Tensor]:
    inputs: dict[str, OpInputs] = {
        name: [as_op_input(value, _FLOAT32, f"{name}[{index}]") for index, value in enumerate(_tensors(values, name))]
        for name, values in (("weights", weights), ("biases", biases))
    }
    request = messages_pb2.CudnnRNNCanonicalToParamsRequest
    outputs = yield from run_op("CudnnRNNCanonicalToParams", request, inputs, attributes, keep=keep, lease=lease)
    params: Tensor = outputs["params"]
    return params


def _tensors(values: Sequence[TensorLike], name: str) -> list[Any]:
    return as_list(values, "a list of tensors", Argument(name))


def _params_to_canonical(
    params: TensorLike,
    attributes: Mapping[str, Any],
    keep: bool,
    lease: float | None,
    names: Mapping[str, str] | None = None,
) -> Operation[CudnnRNNParamsToCanonicalOutputs[Tensor]]:
    inputs = {"params": as_op_input(params, _FLOAT32, "params")}
    request = messages_pb2.CudnnRNNParamsToCanonicalRequest
    outputs = yield from run_op(
        "CudnnRNNParamsToCanonical", request, inputs, attributes, keep=keep, lease=lease, names=names
    )
    return CudnnRNNParamsToCanonicalOutputs(**outputs)


def _network(
    num_layers: ArrayLike, num_units: ArrayLike, input_size: ArrayLike, rnn_mode: str, input_mode: str, direction: str
) -> dict[str, Any]:
    """Returns the attributes of a network; its sizes are scalar tensors to TensorFlow."""
    sizes = {"num_layers": num_layers, "num_units": num_units, "input_size": input_size}
    for name, value in sizes.items():
        size = as_array(value, Argument(name))
        if size.ndim:
            raise InvalidArgumentError(f"{name} is not a scalar", field=name)
        if size.dtype.kind not in "iu" or int(size) not in INT32:
            raise InvalidArgumentError(f"{name} must be an int32, got {described(value)}", field=name)
        sizes[name] = int(size)
    return {**sizes, "rnn_mode": rnn_mode, "input_mode": input_mode, "direction": direction}


def _warn_of_dropout(op: str, dropout: float, seed: int, seed2: int) -> None:
    """Checks arguments that have no effect, and says so if they look as if they were meant to have one."""
    given = {
        "dropout": as_number(dropout, Argument("dropout")),
        "seed": as_integer(seed, Argument("seed"), INT32),
        "seed2": as_integer(seed2, Argument("seed2"), INT32),
    }
    for name, value in given.items():
        if value:
            warn_of_ignored(IgnoredArgument(name, "parameters do not depend on the dropout"), op)


def _check_float(dtype: DTypeLike) -> None:
    name = as_dtype(dtype, Argument("T")).name
    if name not in _FLOATS:
        raise InvalidArgumentError(
            f"Value for attr 'T' of {name} is not in the list of allowed values: {', '.join(_FLOATS)}", field="T"
        )
