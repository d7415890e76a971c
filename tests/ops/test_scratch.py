"""Ops take no more memory besides inputs and outputs than they reserve, and reserve not much more than they take."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.batch_norm.spec import ForwardAttributes as BatchNormAttributes
from gradserve_server.ops.batch_norm.spec import ForwardInputs as BatchNormInputs
from gradserve_server.ops.batch_norm.spec import GradAttributes as BatchNormGradAttributes
from gradserve_server.ops.batch_norm.spec import GradInputs as BatchNormGradInputs
from gradserve_server.ops.cudnn_rnn.declaration import make_network
from gradserve_server.ops.cudnn_rnn.spec import BackpropInputs, ForwardAttributes, ForwardInputs, RnnAttributes
from gradserve_server.ops.gru.spec import CellAttributes, CellInputs, GradAttributes, GradInputs
from gradserve_server.ops.layer_norm.spec import ForwardAttributes as LayerNormAttributes
from gradserve_server.ops.layer_norm.spec import ForwardInputs as LayerNormInputs
from gradserve_server.ops.layer_norm.spec import GradAttributes as LayerNormGradAttributes
from gradserve_server.ops.layer_norm.spec import GradInputs as LayerNormGradInputs
from gradserve_server.ops.operation import AnyOp
from gradserve_server.ops.registry import OPS, make_families
from gradserve_server.ops.runner import arrays_of, check_call

MIB = 1 << 20
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


class TracedDevice(CpuDevice):
    """Its memory is seen by tracemalloc, unlike that of the pool."""

    def __init__(self) -> None:
        super().__init__(BufferPool(0))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)


class Machine:
    """Computes ops, and measures what they take."""

    def __init__(self, parallel: ForkJoin) -> None:
        self._families = make_families(TracedDevice(), parallel)

    def prepare(self, family: str) -> None:
        """Loads the kernels of a family: NumPy, which computes without them, takes more."""
        self._families[family].prepare(lambda: False)

    def compute(self, op: AnyOp, inputs: Any, attributes: Any) -> Any:
        """Returns the outputs; fails if the call took more than it reserves, or much less."""
        call = check_call(op, inputs, attributes)
        family = self._families[op.family]
        tracemalloc.start()
        try:
            outputs = op.compute(family, inputs, attributes, call.plan)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        taken = peak - sum(array.nbytes for array in arrays_of(outputs).values())
        assert taken <= call.scratch_bytes + MIB // 16
        assert call.scratch_bytes <= 3 * peak
        return outputs


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    parallel = ForkJoin(1)
    yield Machine(parallel)
    parallel.close()


RNN_CALLS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "lstm, not training": {"is_training": False},
    "gru, batch first": {"rnn_mode": "gru", "time_major": False},
    "gru, not training": {"rnn_mode": "gru", "direction": "bidirectional", "is_training": False},
    "tanh, two directions": {"rnn_mode": "rnn_tanh", "direction": "bidirectional"},
    "tanh, not training": {"rnn_mode": "rnn_tanh", "is_training": False},
    "dropout": {"dropout": 0.5, "direction": "bidirectional"},
    "projection": {"num_proj": 16},
    "projection, not training": {"num_proj": 16, "direction": "bidirectional", "is_training": False},
}


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "has_lengths"), [(F32, False), (BF16, True)], ids=["float32", "bfloat16, lengths"])
@pytest.mark.parametrize("given", RNN_CALLS)
def test_recurrent_networks(machine: Machine, given: str, dtype: np.dtype[Any], has_lengths: bool) -> None:
    attributes = ForwardAttributes(**RNN_CALLS[given])
    steps, batch, size, units, layers = 40, 100, 24, 32, 3
    network = make_network(attributes, num_layers=layers, input_size=size, num_units=units)

    def zeros(first: int, size: int) -> Any:
        shape = (first, batch) if attributes.time_major else (batch, first)
        return np.zeros((*shape, size), dtype)

    count = network.num_pseudo_layers
    inputs = ForwardInputs(
        input=zeros(steps, size),
        input_h=zeros(count, network.hidden_size),
        params=np.zeros(network.num_params, dtype),
        input_c=zeros(count, units) if attributes.rnn_mode == "lstm" else None,
        sequence_lengths=np.full(batch, steps - 1, np.int32) if has_lengths else None,
    )
    outputs = machine.compute(OPS["CudnnRNN"], inputs, attributes)
    if not attributes.is_training:
        return
    gradients = {"output_backprop": outputs.output, "output_h_backprop": outputs.output_h}
    if attributes.rnn_mode == "lstm":
        gradients["output_c_backprop"] = outputs.output_c
    shared = {field.name: getattr(attributes, field.name) for field in fields(RnnAttributes)}
    backprop_inputs = BackpropInputs(**vars(inputs), **vars(outputs), **gradients)
    machine.compute(OPS["CudnnRNNBackprop"], backprop_inputs, RnnAttributes(**shared))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("batch", "size", "cells"), [(300, 100, 200), (1, 1000, 1000)])
def test_gru_cells(machine: Machine, batch: int, size: int, cells: int, dtype: np.dtype[Any]) -> None:
    machine.prepare("gru")

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, dtype)

    state, weights = zeros(batch, cells), (zeros(size + cells, 2 * cells), zeros(size + cells, cells))
    inputs = CellInputs(zeros(batch, size), state, *weights, zeros(2 * cells), zeros(cells))
    machine.compute(OPS["GRUBlockCell"], inputs, CellAttributes())
    of_gradient = GradInputs(**vars(inputs), r=state, u=state, c=state, d_h=state)
    machine.compute(OPS["GRUBlockCellGrad"], of_gradient, GradAttributes(weight_gradients=True))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(40_000, 8), (100, 5000)])
def test_layer_norm(machine: Machine, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    machine.prepare("layer_norm")
    x, params, moments = np.zeros(shape, dtype), np.zeros(shape[1], F32), np.zeros(shape[0], F32)
    machine.compute(OPS["LayerNorm"], LayerNormInputs(x, params, params), LayerNormAttributes(1e-5))
    machine.compute(
        OPS["LayerNormGrad"], LayerNormGradInputs(x, x, params, moments, moments), LayerNormGradAttributes()
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(64, 16, 16, 24), (2, 2, 2, 20_000)])
def test_fused_batch_norm(machine: Machine, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    machine.prepare("batch_norm")
    x, params = np.zeros(shape, dtype), np.zeros(shape[-1], F32)
    inputs = BatchNormInputs(x, params, params, params, params)
    machine.compute(OPS["FusedBatchNorm"], inputs, BatchNormAttributes())
    gradient = BatchNormGradInputs(x, x, params, params, params)
    machine.compute(OPS["FusedBatchNormGrad"], gradient, BatchNormGradAttributes())
