"""The mathematics of CudnnRNN and CudnnRNNBackprop over NumPy or CuPy, with which tests compare the implementations.

Everything is computed in the problem's compute_dtype, time first. Beyond the end of a sequence, states do not change
and outputs are 0.

The cells are as in cuDNN's manual for cudnnRNNMode_t, with both biases, and the gradients follow from them. At a step
of a pseudo-layer, x is the input, hp and cp are the states before, q = R hp + bR, sigma is the logistic function, and
products of vectors are elementwise.

    rnn   h = f(W x + bW + q), f being relu or tanh
    lstm  i, f, o = sigma(W x + bW + q), each with its own W, R and biases,  g = tanh(W x + bW + q) likewise,
          c = f cp + i g,  h = o tanh(c), or P o tanh(c) with a projection
    gru   r, z = sigma(W x + bW + q) likewise,  n = tanh(W x + bW + r q),  h = (1 - z) n + z hp

With skip_input the first layer has x itself in place of W x.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropOutputs,
    ForwardInputs,
    Mode,
    Network,
    Problem,
    PseudoLayerParams,
    split_params,
)


@dataclass(frozen=True)
class Step:
    """The values of a pseudo-layer at one step; all but `is_valid` in compute_dtype.

    Attributes:
        x: Its input, [B, columns].
        previous_h: hp, [B, H'].
        previous_c: cp, [B, H]; for lstm.
        gates: The gates in their order, each [B, H]; h itself for rnn_relu and rnn_tanh.
        candidate_q: q of the new memory n, [B, H]; for gru.
        c: c, [B, H]; for lstm.
        h: h before the projection, [B, H].
        is_valid: Whether the sequences have this step, [B, 1].
    """

    x: Array
    previous_h: Array
    previous_c: Array | None
    gates: tuple[Array, ...]
    candidate_q: Array | None
    c: Array | None
    h: Array
    is_valid: Array


@dataclass(frozen=True)
class StepGradients:
    """Gradients at one step.

    Attributes:
        a: The gradient of the arguments of the gates' functions, [B, G * H].
        dq: The gradient of q, [B, G * H]: equal to a, except for n of gru.
        direct_h: The part of the gradient of hp that does not pass through q.
        c: The gradient of cp; for lstm.
    """

    a: Array
    dq: Array
    direct_h: Array | float = 0.0
    c: Array | None = None


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


def step_forward(
    xp: Any, network: Network, params: PseudoLayerParams, x: Array, h: Array, c: Array | None, is_valid: Array
) -> Step:
    """Computes a step from the states h and c."""
    skips = not params.input_weights.shape[1]
    projected = xp.tile(x, network.mode.num_gates) if skips else x @ params.input_weights.T
    from_x = xp.split(projected + params.input_bias, network.mode.num_gates, axis=1)
    q = xp.split(h @ params.recurrent_weights.T + params.recurrent_bias, network.mode.num_gates, axis=1)
    candidate_q = new_c = None
    gates: tuple[Array, ...]
    if network.mode is Mode.LSTM:
        i, f, o = (_sigmoid(xp, from_x[gate] + q[gate]) for gate in (0, 1, 3))
        g = xp.tanh(from_x[2] + q[2])
        gates = (i, f, g, o)
        new_c = f * c + i * g
        new_h = o * xp.tanh(new_c)
    elif network.mode is Mode.GRU:
        r, z = (_sigmoid(xp, from_x[gate] + q[gate]) for gate in (0, 1))
        candidate_q = q[2]
        n = xp.tanh(from_x[2] + r * candidate_q)
        gates = (r, z, n)
        new_h = (1 - z) * n + z * h
    else:
        new_h = xp.maximum(from_x[0] + q[0], 0) if network.mode is Mode.RELU else xp.tanh(from_x[0] + q[0])
        gates = (new_h,)
    return Step(x, h, c, gates, candidate_q, new_c, new_h, is_valid)


def step_backward(xp: Any, mode: Mode, step: Step, d: Array, dc: Array | None) -> StepGradients:
    """Computes the gradients of one step, from the gradients of h before the projection and of c."""
    if mode is Mode.LSTM:
        i, f, g, o = step.gates
        tanh_c = xp.tanh(step.c)
        dc = dc + d * o * (1 - tanh_c**2)
        a = xp.concatenate(
            [
                dc * g * i * (1 - i),
                dc * step.previous_c * f * (1 - f),
                dc * i * (1 - g**2),
                d * tanh_c * o * (1 - o),
            ],
            axis=1,
        )
        return StepGradients(a, a, c=dc * f)
    if mode is Mode.GRU:
        r, z, n = step.gates
        a_n = d * (1 - z) * (1 - n**2)
        a_r = a_n * step.candidate_q * r * (1 - r)
        a_z = d * (step.previous_h - n) * z * (1 - z)
        a = xp.concatenate([a_r, a_z, a_n], axis=1)
        return StepGradients(a, xp.concatenate([a_r, a_z, a_n * r], axis=1), direct_h=d * z)
    a = d * (step.h > 0) if mode is Mode.RELU else d * (1 - step.h**2)
    return StepGradients(a, a)


def _sigmoid(xp: Any, x: Array) -> Array:
    """The logistic function, in a form that cannot overflow."""
    return (1 + xp.tanh(x / 2)) / 2


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
