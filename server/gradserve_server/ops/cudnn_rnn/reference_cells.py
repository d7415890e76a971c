"""One step of the cells of CudnnRNN and its gradient, over NumPy or CuPy.

The cells are as in cuDNN's manual for cudnnRNNMode_t, with both biases, and the gradients follow from them. At a step
of a pseudo-layer, x is the input, hp and cp are the states before, q = R hp + bR, sigma is the logistic function, and
products of vectors are elementwise.

    rnn   h = f(W x + bW + q), f being relu or tanh
    lstm  i, f, o = sigma(W x + bW + q), each with its own W, R and biases,  g = tanh(W x + bW + q) likewise,
          c = f cp + i g,  h = o tanh(c), or P o tanh(c) with a projection
    gru   r, z = sigma(W x + bW + q) likewise,  n = tanh(W x + bW + r q),  h = (1 - z) n + z hp

With skip_input the first layer has x itself in place of W x.
"""

from dataclasses import dataclass
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.ops.cudnn_rnn.network import Mode, Network, PseudoLayerParams


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
