"""The ops CudnnRNN and CudnnRNNBackprop: their checks, their scratch memory and their interface on a device.

Messages, and the order of the checks, are TensorFlow's where it has them. Conditions that TensorFlow does not check, or
that end its process, are checked after that.

The bounds for scratch memory, everything besides inputs and outputs, are those of the host. A GPU takes about as much,
plus cuDNN's work space, whose size only cuDNN knows. They count elements in the dtype of the computation, for each step
of each sequence unless stated otherwise; the letters are those of `spec`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.spec import (
    HEADER_BYTES,
    BackpropInputs,
    BackpropOutputs,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Mode,
    Network,
    NetworkAttributes,
    Plan,
    Problem,
    RnnAttributes,
)
from gradserve_server.ops.operation import Family, Op
from gradserve_server.tensors.spec import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    TensorSpec,
    check_type_attribute,
    dtype_text,
    shape_text,
)

FAMILY = "cudnn_rnn"


class CudnnRnn(Family, Protocol):
    """CudnnRNN on one device. Inputs are checked and in its memory, where outputs are, too."""

    def forward(self, inputs: ForwardInputs, problem: Problem) -> ForwardOutputs:
        """Computes CudnnRNN.

        Raises:
            InvalidArgumentError: A sequence length is not from 1 to T.
        """
        ...

    def backprop(self, inputs: BackpropInputs, problem: Problem) -> BackpropOutputs:
        """Computes CudnnRNNBackprop.

        Raises:
            InvalidArgumentError: reserve_space or host_reserved are not from a forward call for this problem on this
                device, or not from the same one; or a sequence length is not from 1 to T.
        """
        ...


def _forward(family: CudnnRnn, inputs: ForwardInputs, attributes: ForwardAttributes, plan: Plan) -> ForwardOutputs:
    return family.forward(inputs, plan.problem)


def _backprop(family: CudnnRnn, inputs: BackpropInputs, attributes: RnnAttributes, plan: Plan) -> BackpropOutputs:
    return family.backprop(inputs, plan.problem)


def plan_forward(inputs: ForwardInputs, attributes: ForwardAttributes) -> Plan:
    """Checks a call of CudnnRNN.

    The device checks the values of sequence_lengths.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    _check_attributes(attributes)
    check_floats(inputs.input, "input", _floats(inputs, attributes))
    problem = _problem(inputs, attributes, is_training=attributes.is_training)
    _check_beyond_tensorflow(inputs, attributes, problem)
    output, hidden, cell = _specs(problem)
    reserve_space, host_reserved = TensorSpec(problem.dtype, ()), TensorSpec(_INT8, ())
    if problem.is_training:
        reserve_space = TensorSpec(problem.dtype, (-(-problem.max_reserve_bytes // problem.dtype.itemsize),))
        host_reserved = TensorSpec(_INT8, (HEADER_BYTES,))
    return Plan(problem, (output, hidden, cell, reserve_space, host_reserved))


def plan_backprop(inputs: BackpropInputs, attributes: RnnAttributes) -> Plan:
    """Checks a call of CudnnRNNBackprop.

    The device checks the contents of sequence_lengths, reserve_space and host_reserved.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    _check_attributes(attributes)
    outputs = ["output", "output_h", "output_backprop", "output_h_backprop"]
    if attributes.rnn_mode == Mode.LSTM.value:
        outputs += ["output_c", "output_c_backprop"]
    floats = {name: getattr(inputs, name) for name in (*outputs, "reserve_space")}
    check_floats(inputs.input, "input", _floats(inputs, attributes) | floats)
    problem = _problem(inputs, attributes, is_training=True)
    output, hidden, cell = _specs(problem)
    for name, spec in zip(outputs, (output, hidden, output, hidden, cell, cell), strict=False):
        _check_shape(floats[name], name, spec.shape)
    _check_beyond_tensorflow(inputs, attributes, problem)
    _check_reserved(inputs)
    params = TensorSpec(problem.dtype, (problem.network.num_params,))
    return Plan(problem, (TensorSpec(problem.dtype, tuple(inputs.input.shape)), hidden, cell, params))


def forward_scratch_bytes(inputs: ForwardInputs, _attributes: ForwardAttributes, plan: Plan) -> int:
    """Returns a bound for CudnnRNN.

    Copies of the inputs; what dropout draws for all layers; what three layers save, if no reserve space has it; and for
    one pseudo-layer its gates and a copy of its recurrent weights.
    """
    problem = plan.problem
    network = problem.network
    per_state = _input_copies(inputs, problem) * network.input_size + _dropout(problem)
    if network.mode not in _SAVED_VALUES:
        per_state += network.num_units
    if not problem.is_training:
        saved = (_SAVED_VALUES.get(network.mode, 0) + (network.num_proj > 0)) * network.num_units
        per_state += min(network.num_layers, 3) * network.num_directions * (network.hidden_size + saved)
    return _bytes(problem, per_state, network.gates_size * network.hidden_size + _copied_params(problem))


def backprop_scratch_bytes(inputs: BackpropInputs, _attributes: RnnAttributes, plan: Plan) -> int:
    """Returns a bound for CudnnRNNBackprop.

    Copies of the inputs; the gradients of the inputs of two layers, of each direction; and for one pseudo-layer its
    input after dropout, the gradients of its gates and states, and a copy of its weights.
    """
    problem = plan.problem
    network, width = problem.network, _width(problem)
    gates = _GATE_GRADIENTS.get(network.mode, 1) * network.num_units
    widest = max(network.input_size, width)
    per_state = _input_copies(inputs, problem) * network.input_size + 3 * widest + gates
    per_state += width if _is_copied(problem) else 0
    per_state += network.num_units + network.hidden_size if network.num_proj else 0
    per_state += 2 * width if problem.dropout else 0
    per_state += 2 * gates if problem.max_seq_length * problem.batch <= _FEW_TERMS else 0
    return _bytes(problem, per_state, network.gates_size * widest + 2 * _copied_params(problem))


def check_network_attributes(attributes: RnnAttributes | NetworkAttributes) -> None:
    """Checks the attributes that describe a network.

    Raises:
        InvalidArgumentError: One has a value that is not allowed.
    """
    for name, allowed in _ALLOWED.items():
        value = getattr(attributes, name)
        if value not in allowed:
            raise InvalidArgumentError(
                f"Value for attr '{name}' of \"{value}\" is not in the list of allowed values: "
                + ", ".join(f'"{each}"' for each in allowed),
                field=name,
            )
    check_int32(attributes, "num_proj")


def make_network(
    attributes: RnnAttributes | NetworkAttributes, *, num_layers: int, input_size: int, num_units: int
) -> Network:
    """Returns the network that attributes and sizes describe.

    Raises:
        InvalidArgumentError: The attributes say to skip the first layer's matrices, but I and H differ.
    """
    mode = Mode(attributes.rnn_mode)
    if attributes.input_mode == "skip_input" and input_size != num_units:
        raise InvalidArgumentError(
            f"skip_input needs an input_size equal to num_units, got {input_size} and {num_units}", field="input_mode"
        )
    projects = mode is Mode.LSTM and attributes.num_proj != num_units
    return Network(
        mode=mode,
        num_layers=num_layers,
        num_directions=num_directions(attributes),
        input_size=input_size,
        num_units=num_units,
        num_proj=attributes.num_proj if projects else 0,
        skip_input=attributes.input_mode != "linear_input" and input_size == num_units,
    )


def num_directions(attributes: RnnAttributes | NetworkAttributes) -> int:
    """Returns D."""
    return 2 if attributes.direction == "bidirectional" else 1


def check_int32(attributes: Any, name: str) -> None:
    """Checks an attribute that TensorFlow reads as an int32."""
    value = getattr(attributes, name)
    if not -(2**31) <= value < 2**31:
        raise InvalidArgumentError(f"Attr {name} has value {value} out of range for an int32", field=name)


def check_floats(first: Array, first_name: str, others: Mapping[str, Array | None]) -> None:
    """Checks that all arrays are present, and have the same dtype, one that the ops support."""
    check_type_attribute(first.dtype, first_name, _DTYPES)
    for name, array in others.items():
        if array is None:
            raise InvalidArgumentError(f"{name} is missing; rnn_mode lstm needs it", field=name)
        if array.dtype != first.dtype:
            raise InvalidArgumentError(
                f"{name} must have the dtype of {first_name}, {dtype_text(first.dtype)}, got {dtype_text(array.dtype)}",
                field=name,
            )


def check_params(params: Array, network: Network) -> None:
    """Checks the length of a parameter vector."""
    if tuple(params.shape) != (network.num_params,):
        raise InvalidArgumentError(
            f"params must have shape [{network.num_params}] for {description(network)}, got {shape_text(params.shape)}",
            field="params",
        )


def check_lengths(lengths: NDArray[Any], problem: Problem) -> None:
    """Checks the lengths of sequences, which the device has copied before: clients may change the given ones.

    Raises:
        InvalidArgumentError: A length is not from 1 to T.
    """
    steps = problem.max_seq_length
    wrong = np.flatnonzero((lengths < 1) | (lengths > steps))
    if wrong.size:
        index = int(wrong[0])
        raise InvalidArgumentError(
            f"sequence_lengths must be from 1 to max_seq_length, which is {steps}, "
            f"got {lengths[index]} at index {index}",
            field="sequence_lengths",
        )


def description(network: Network) -> str:
    """Describes the properties that determine the length of the parameter vector."""
    extra = f", num_proj {network.num_proj}" if network.num_proj else ""
    extra += ", skip_input" if network.skip_input else ""
    direction = "unidirectional" if network.num_directions == 1 else "bidirectional"
    sizes = f"num_layers {network.num_layers}, input_size {network.input_size}, num_units {network.num_units}"
    return f"{direction} {network.mode.value} with {sizes}{extra}"


_ALLOWED = {
    "rnn_mode": tuple(mode.value for mode in Mode),
    "input_mode": ("linear_input", "skip_input", "auto_select"),
    "direction": ("unidirectional", "bidirectional"),
}
_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)

_DTYPES = (BFLOAT16, FLOAT16, FLOAT32, FLOAT64)
"""The dtypes of floats, in the order of TensorFlow's messages."""


def _check_attributes(attributes: RnnAttributes) -> None:
    check_network_attributes(attributes)
    for name in ("seed", "seed2"):
        check_int32(attributes, name)


def _floats(inputs: ForwardInputs | BackpropInputs, attributes: RnnAttributes) -> dict[str, Array | None]:
    """Returns the other inputs of CudnnRNN that have the dtype of `input`."""
    cell = {"input_c": inputs.input_c} if attributes.rnn_mode == Mode.LSTM.value else {}
    return {"input_h": inputs.input_h, **cell, "params": inputs.params}


def _problem(inputs: ForwardInputs | BackpropInputs, attributes: RnnAttributes, *, is_training: bool) -> Problem:
    """Makes TensorFlow's checks of the shapes of CudnnRNN's inputs; returns the problem."""
    for name in ("input", "input_h"):
        if len(getattr(inputs, name).shape) != 3:
            raise InvalidArgumentError(f"RNN {name} must be a 3-D vector.", field=name)
    max_seq_length, batch, input_size = inputs.input.shape
    num_pseudo_layers, _, hidden_size = inputs.input_h.shape
    if not attributes.time_major:
        batch, max_seq_length, _ = inputs.input.shape
        _, num_pseudo_layers, _ = inputs.input_h.shape
    num_layers, dropped = divmod(num_pseudo_layers, num_directions(attributes))
    num_pseudo_layers -= dropped
    states = (num_pseudo_layers, batch) if attributes.time_major else (batch, num_pseudo_layers)
    _check_shape(inputs.input_h, "input_h", (*states, hidden_size))
    num_units = hidden_size
    if attributes.rnn_mode == Mode.LSTM.value:
        num_units = _check_cell(inputs, attributes.num_proj)
    return Problem(
        network=make_network(attributes, num_layers=num_layers, input_size=input_size, num_units=num_units),
        dtype=inputs.input.dtype,
        max_seq_length=max_seq_length,
        batch=batch,
        time_major=attributes.time_major,
        dropout=attributes.dropout if is_training and num_layers > 1 else 0.0,
        seed=attributes.seed % 2**32 << 32 | attributes.seed2 % 2**32,
        is_training=is_training,
    )


def _check_cell(inputs: ForwardInputs | BackpropInputs, num_proj: int) -> int:
    """Checks the shape of input_c against the shape of input_h; returns H."""
    hidden, cell = inputs.input_h.shape, inputs.input_c.shape  # type: ignore[union-attr]
    if not num_proj:
        if hidden != cell:
            raise InvalidArgumentError(
                f"input_h and input_c must have the same shape w/o projection: {shape_text(hidden)} {shape_text(cell)}",
                field="input_c",
            )
    elif len(cell) != 3 or hidden[2] > cell[2] or num_proj != hidden[2] or hidden[:2] != cell[:2]:
        raise InvalidArgumentError(
            f"Invalid input_h and input_c w/ projection size: {num_proj} {shape_text(hidden)} {shape_text(cell)}",
            field="input_c",
        )
    return int(cell[2])


def _check_shape(array: Array, name: str, expected: tuple[int, ...]) -> None:
    if tuple(array.shape) != expected:
        raise InvalidArgumentError(
            f"Invalid {name} shape: {shape_text(array.shape)} {shape_text(expected)}", field=name
        )


def _check_beyond_tensorflow(
    inputs: ForwardInputs | BackpropInputs, attributes: RnnAttributes, problem: Problem
) -> None:
    """Makes other checks, such as for empty sequences, batches and states, which TensorFlow leaves to cuDNN."""
    for name, sizes in (
        ("input", "max_seq_length, batch_size and input_size"),
        ("input_h", "num_layers and num_units"),
    ):
        shape = getattr(inputs, name).shape
        if 0 in shape:
            raise InvalidArgumentError(f"{sizes} must be at least 1, got {name} {shape_text(shape)}", field=name)
    if problem.is_training and not 0 <= attributes.dropout < 1:
        raise InvalidArgumentError(f"dropout must be in [0, 1), got {attributes.dropout}", field="dropout")
    check_params(inputs.params, problem.network)
    lengths = inputs.sequence_lengths
    if lengths is not None and (lengths.dtype != _INT32 or tuple(lengths.shape) != (problem.batch,)):
        raise InvalidArgumentError(
            f"sequence_lengths must be int32 of shape [{problem.batch}], one for each sequence of the batch, "
            f"got {dtype_text(lengths.dtype)} {shape_text(lengths.shape)}",
            field="sequence_lengths",
        )


def _check_reserved(inputs: BackpropInputs) -> None:
    if len(inputs.reserve_space.shape) != 1:
        raise InvalidArgumentError(
            "reserve_space must be 1-dimensional, as CudnnRNN gives it when is_training, "
            f"got shape {shape_text(inputs.reserve_space.shape)}",
            field="reserve_space",
        )
    reserved = inputs.host_reserved
    if reserved is not None and (reserved.dtype != _INT8 or len(reserved.shape) != 1):
        raise InvalidArgumentError(
            "host_reserved must be 1-dimensional int8, as CudnnRNN gives it when is_training, "
            f"got {dtype_text(reserved.dtype)} {shape_text(reserved.shape)}",
            field="host_reserved",
        )


def _specs(problem: Problem) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Returns the specs of `output`, of hidden states, and of cell states or of the scalar that replaces them."""
    network, dtype = problem.network, problem.dtype
    output = problem.sequence_shape(network.num_directions * network.hidden_size)
    cell = problem.state_shape(network.num_units) if network.mode is Mode.LSTM else ()
    return (
        TensorSpec(dtype, output),
        TensorSpec(dtype, problem.state_shape(network.hidden_size)),
        TensorSpec(dtype, cell),
    )


_SAVED_VALUES = {Mode.LSTM: 5, Mode.GRU: 4}
"""The values that are saved for each unit and step, gates and states; with a projection one more."""
_GATE_GRADIENTS = {Mode.LSTM: 4, Mode.GRU: 4}
"""The gradients that are computed for each unit and step."""
_FEW_TERMS = 1024
"""Sums of no more terms may be computed in float64."""


def _bytes(problem: Problem, per_state: int, weights: int) -> int:
    """Returns the bytes for every step of every sequence and the states around them, for one step, and for weights."""
    states = (problem.max_seq_length + 2) * problem.batch
    of_a_step = 4 * problem.batch * problem.network.gates_size
    return problem.compute_dtype.itemsize * (states * (per_state + 1) + of_a_step + weights)


def _width(problem: Problem) -> int:
    return problem.network.num_directions * problem.network.hidden_size


def _is_copied(problem: Problem) -> bool:
    return not problem.time_major or problem.dtype != problem.compute_dtype


def _input_copies(inputs: ForwardInputs | BackpropInputs, problem: Problem) -> int:
    return _is_copied(problem) + (inputs.sequence_lengths is not None)


def _copied_params(problem: Problem) -> int:
    return problem.network.num_params if problem.dtype != problem.compute_dtype else 0


def _dropout(problem: Problem) -> int:
    """Returns what dropout draws: factors for all pseudo-layers above the first layer, and two arrays to make one."""
    above = problem.network.num_pseudo_layers - problem.network.num_directions
    return (above + 2) * _width(problem) if problem.dropout else 0


CUDNN_RNN = Op(
    name="CudnnRNN",
    family=FAMILY,
    inputs=ForwardInputs,
    attributes=ForwardAttributes,
    outputs=ForwardOutputs,
    plan=plan_forward,
    compute=_forward,
    scratch_bytes=forward_scratch_bytes,
    is_quick=False,
)

CUDNN_RNN_BACKPROP = Op(
    name="CudnnRNNBackprop",
    family=FAMILY,
    inputs=BackpropInputs,
    attributes=RnnAttributes,
    outputs=BackpropOutputs,
    plan=plan_backprop,
    compute=_backprop,
    scratch_bytes=backprop_scratch_bytes,
    is_quick=False,
)
