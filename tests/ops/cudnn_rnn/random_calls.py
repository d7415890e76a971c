"""Calls of CudnnRNN and its gradient with random numbers, and a device for them."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import CpuDevice
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn, dropout_masks
from gradserve_server.ops.cudnn_rnn.declaration import make_network, plan_forward
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropInputs,
    BackpropOutputs,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
)
from tests.ops.cudnn_rnn.reference import OutputGradients, cudnn_rnn, cudnn_rnn_backprop

FORWARD_OUTPUTS = ("output", "output_h", "output_c")


class Numbers:
    """Bytes that are not random, but never twice the same."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self, num_bytes: int) -> bytes:
        return next(self._numbers).to_bytes(num_bytes, "little")


class DirtyDevice(CpuDevice):
    """Its memory holds what looks like somebody else's."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        array = super().empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xFF
        return array


class Call:
    """A forward and a backward call with random numbers."""

    def __init__(
        self,
        attributes: ForwardAttributes,
        *,
        steps: int = 5,
        batch: int = 3,
        input_size: int = 4,
        units: int = 4,
        layers: int = 2,
        lengths: list[int] | None = None,
        dtype: Any = np.float64,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        directions = 2 if attributes.direction == "bidirectional" else 1
        hidden = attributes.num_proj or units

        def draw(first: int, second: int, size: int) -> NDArray[Any]:
            shape = (first, second, size) if attributes.time_major else (second, first, size)
            return random.uniform(-1, 1, shape).astype(dtype)

        is_lstm = attributes.rnn_mode == "lstm"
        states = layers * directions
        network = make_network(attributes, num_layers=layers, input_size=input_size, num_units=units)
        self.attributes = attributes
        self.inputs = ForwardInputs(
            input=draw(steps, batch, input_size),
            input_h=draw(states, batch, hidden),
            params=random.uniform(-0.5, 0.5, network.num_params).astype(dtype),
            input_c=draw(states, batch, units) if is_lstm else None,
            sequence_lengths=None if lengths is None else np.array(lengths, np.int32),
        )
        self.gradients = OutputGradients(
            output_backprop=draw(steps, batch, directions * hidden),
            output_h_backprop=draw(states, batch, hidden),
            output_c_backprop=draw(states, batch, units) if is_lstm else None,
        )
        self.problem = plan_forward(self.inputs, attributes).problem

    def backprop_inputs(self, forward: ForwardOutputs) -> BackpropInputs:
        return BackpropInputs(**vars(self.inputs), **vars(self.gradients), **vars(forward))

    def run(self, rnn: CpuCudnnRnn) -> tuple[ForwardOutputs, BackpropOutputs]:
        forward = rnn.forward(self.inputs, self.problem)
        return forward, rnn.backprop(self.backprop_inputs(forward), self.problem)

    def expected(self) -> dict[str, NDArray[Any]]:
        masks = dropout_masks(self.problem)
        trace = cudnn_rnn(np, self.inputs, self.problem, masks)
        backprop = cudnn_rnn_backprop(np, self.inputs, self.gradients, trace, self.problem, masks)
        return {name: getattr(trace, name) for name in FORWARD_OUTPUTS} | vars(backprop)


def numbers(forward: ForwardOutputs, backprop: BackpropOutputs) -> dict[str, NDArray[Any]]:
    return {name: getattr(forward, name) for name in FORWARD_OUTPUTS} | vars(backprop)
