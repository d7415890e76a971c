"""The memory of CudnnRNN and CudnnRNNBackprop besides inputs and outputs: bounds for the host.

A GPU takes about as much, but for cuDNN's work space, of which only cuDNN knows the size. The letters are as in
`network`. Sizes are elements in the dtype of the computation for each step of each sequence, if not said otherwise.
"""

from gradserve_server.ops.cudnn_rnn.network import Mode
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropInputs,
    ForwardAttributes,
    ForwardInputs,
    Plan,
    Problem,
    RnnAttributes,
)

_SAVED_VALUES = {Mode.LSTM: 5, Mode.GRU: 4}
"""The values that are saved for each unit and step, gates and states; with a projection one more."""
_GATE_GRADIENTS = {Mode.LSTM: 4, Mode.GRU: 4}
"""The gradients that are computed for each unit and step."""
_FEW_TERMS = 1024
"""Sums of no more terms may be computed in float64."""


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
