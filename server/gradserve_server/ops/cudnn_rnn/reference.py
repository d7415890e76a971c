"""The mathematics of CudnnRNN and CudnnRNNBackprop, over NumPy or CuPy.

The implementations are compared with it. Everything is computed in the problem's compute_dtype, time first; the cells
are in `reference_cells`. Beyond the end of a sequence states do not change, and outputs are 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.ops.cudnn_rnn.network import Mode, Network, PseudoLayerParams, split_params
from gradserve_server.ops.cudnn_rnn.reference_cells import Step, step_backward, step_forward
from gradserve_server.ops.cudnn_rnn.spec import BackpropOutputs, ForwardInputs, Problem


@dataclass(frozen=True)
class Trace:
    """The results of CudnnRNN, with its steps.

    Attributes:
        output: See ForwardOutputs.
        output_h: See ForwardOutputs.
        output_c: See ForwardOutputs.
        steps: The steps of each pseudo-layer, by time.
    """

    output: Array
    output_h: Array
    output_c: Array
    steps: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class OutputGradients:
    """The gradients of the outputs, as in BackpropInputs."""

    output_backprop: Array
    output_h_backprop: Array
    output_c_backprop: Array | None = None


def cudnn_rnn(xp: Any, inputs: ForwardInputs, problem: Problem, masks: Sequence[Array] = ()) -> Trace:
    """Applies a network to sequences.

    Args:
        xp: NumPy or CuPy.
        inputs: The inputs of the op. Sequence lengths are from 1 to T.
        problem: The problem. Its dropout and seed are not used.
        masks: The factors of the input of each pseudo-layer of the layers >= 1, [T, B, D * H']; empty for no dropout.
    """
    network, dtype = problem.network, problem.compute_dtype
    params = split_params(network, inputs.params.astype(dtype))
    is_valid = _is_valid(xp, inputs, problem)
    states_h = _time_first(problem, inputs.input_h).astype(dtype)
    states_c = _cell_states(problem, inputs.input_c)
    lower = xp.where(is_valid, _time_first(problem, inputs.input).astype(dtype), 0)
    steps: list[tuple[Step, ...]] = []
    last_h, last_c = [], []
    for layer in range(network.num_layers):
        outputs = []
        for direction in range(network.num_directions):
            index = layer * network.num_directions + direction
            x = lower * masks[index - network.num_directions] if layer and masks else lower
            scan = _scan(xp, network, params[index], x, states_h[index], states_c[index], is_valid, direction)
            steps.append(scan.steps)
            outputs.append(scan.output)
            last_h.append(scan.h)
            last_c.append(scan.c)
        lower = xp.concatenate(outputs, axis=2)
    return Trace(
        output=_given_order(xp, problem, lower),
        output_h=_given_order(xp, problem, xp.stack(last_h)),
        output_c=_cells(xp, problem, last_c),
        steps=tuple(steps),
    )


def cudnn_rnn_backprop(
    xp: Any,
    inputs: ForwardInputs,
    gradients: OutputGradients,
    trace: Trace,
    problem: Problem,
    masks: Sequence[Array] = (),
) -> BackpropOutputs:
    """Computes the gradients of CudnnRNN for its inputs, from a trace of it with the same inputs and masks."""
    network, dtype = problem.network, problem.compute_dtype
    params = split_params(network, inputs.params.astype(dtype))
    params_backprop = xp.zeros(network.num_params, dtype)
    params_gradients = split_params(network, params_backprop)
    carries_h = _time_first(problem, gradients.output_h_backprop).astype(dtype)
    carries_c = _cell_states(problem, gradients.output_c_backprop)
    upper = _time_first(problem, gradients.output_backprop).astype(dtype)
    first_h: list[Array] = []
    first_c: list[Array] = []
    for layer in reversed(range(network.num_layers)):
        lower = 0.0
        for direction in reversed(range(network.num_directions)):
            index = layer * network.num_directions + direction
            mine = upper[..., direction * network.hidden_size : (direction + 1) * network.hidden_size]
            back = _scan_back(
                xp,
                network,
                params[index],
                params_gradients[index],
                trace.steps[index],
                mine,
                carries_h[index],
                carries_c[index],
                direction,
            )
            mask = masks[index - network.num_directions] if layer and masks else 1.0
            lower = lower + back.x * mask
            first_h.insert(0, back.h)
            first_c.insert(0, back.c)
        upper = lower
    return BackpropOutputs(
        input_backprop=_given_order(xp, problem, upper),
        input_h_backprop=_given_order(xp, problem, xp.stack(first_h)),
        input_c_backprop=_cells(xp, problem, first_c),
        params_backprop=params_backprop.astype(problem.dtype),
    )


@dataclass(frozen=True)
class _Scan:
    """The pass of a pseudo-layer through time: its steps by time, its output [T, B, H'] and its last states."""

    steps: tuple[Step, ...]
    output: Array
    h: Array
    c: Array | None


@dataclass(frozen=True)
class _Gradients:
    """Gradients of the input of a pseudo-layer, [T, B, columns], and of its first states."""

    x: Array
    h: Array
    c: Array | None


def _scan(
    xp: Any,
    network: Network,
    params: PseudoLayerParams,
    x: Array,
    h: Array,
    c: Array | None,
    is_valid: Array,
    direction: int,
) -> _Scan:
    steps: dict[int, Step] = {}
    outputs: dict[int, Array] = {}
    for time in _times(len(x), direction):
        step = step_forward(xp, network, params, x[time], h, c, is_valid[time])
        new_h = step.h if params.projection is None else step.h @ params.projection.T
        outputs[time] = xp.where(step.is_valid, new_h, 0)
        h = xp.where(step.is_valid, new_h, h)
        c = None if c is None else xp.where(step.is_valid, step.c, c)
        steps[time] = step
    order = range(len(x))
    return _Scan(tuple(steps[time] for time in order), xp.stack([outputs[time] for time in order]), h, c)


def _scan_back(
    xp: Any,
    network: Network,
    params: PseudoLayerParams,
    params_gradients: PseudoLayerParams,
    steps: Sequence[Step],
    output_backprop: Array,
    h: Array,
    c: Array | None,
    direction: int,
) -> _Gradients:
    """Adds to the gradients of the parameters; `h` and `c` are the gradients of the last states."""
    x: dict[int, Array] = {}
    for time in reversed(_times(len(steps), direction)):
        step = steps[time]
        # For a step that a sequence does not have both are 0, and so is everything computed from them.
        d = xp.where(step.is_valid, output_backprop[time] + h, 0)
        dc = None if c is None else xp.where(step.is_valid, c, 0)
        if params.projection is not None:
            params_gradients.projection[...] += d.T @ step.h  # type: ignore[index]
            d = d @ params.projection
        back = step_backward(xp, network.mode, step, d, dc)
        if params.input_weights.shape[1]:
            x[time] = back.a @ params.input_weights
            params_gradients.input_weights[...] += back.a.T @ step.x
        else:
            x[time] = sum(xp.split(back.a, network.mode.num_gates, axis=1))
        params_gradients.recurrent_weights[...] += back.dq.T @ step.previous_h
        params_gradients.input_bias[...] += back.a.sum(axis=0)
        params_gradients.recurrent_bias[...] += back.dq.sum(axis=0)
        h = xp.where(step.is_valid, back.dq @ params.recurrent_weights + back.direct_h, h)
        c = None if c is None else xp.where(step.is_valid, back.c, c)
    return _Gradients(xp.stack([x[time] for time in range(len(steps))]), h, c)


def _times(count: int, direction: int) -> range:
    """All steps, in the order in which a direction takes them."""
    return range(count - 1, -1, -1) if direction else range(count)


def _is_valid(xp: Any, inputs: ForwardInputs, problem: Problem) -> Array:
    """Returns whether each sequence has each step, [T, B, 1]."""
    times = xp.arange(problem.max_seq_length)[:, None, None]
    if inputs.sequence_lengths is None:
        return xp.broadcast_to(times >= 0, (problem.max_seq_length, problem.batch, 1))
    return times < inputs.sequence_lengths[None, :, None]


def _cell_states(problem: Problem, states: Array | None) -> Sequence[Array | None]:
    """Returns the cell states by pseudo-layer; None except for lstm."""
    if problem.network.mode is not Mode.LSTM or states is None:
        return [None] * problem.network.num_pseudo_layers
    cells: Sequence[Array] = _time_first(problem, states).astype(problem.compute_dtype)
    return cells


def _cells(xp: Any, problem: Problem, cells: Sequence[Array | None]) -> Array:
    """Returns output_c, or the scalar that replaces it."""
    if problem.network.mode is not Mode.LSTM:
        return xp.zeros((), problem.dtype)
    return _given_order(xp, problem, xp.stack(cells))


def _time_first(problem: Problem, array: Array) -> Array:
    """Returns an array with time, or the pseudo-layer, first."""
    return array if problem.time_major else array.swapaxes(0, 1)


def _given_order(xp: Any, problem: Problem, array: Array) -> Array:
    """Reverses `_time_first`, and converts to the problem's dtype."""
    return xp.ascontiguousarray(_time_first(problem, array).astype(problem.dtype))
