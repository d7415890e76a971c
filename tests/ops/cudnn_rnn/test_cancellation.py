"""Recurrent networks that are cancelled, and those that only could have been."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import Cancellation
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.errors import UnavailableError
from gradserve_server.ops.cudnn_rnn.cpu import cells as kernel_cells
from gradserve_server.ops.cudnn_rnn.cpu.cells import NumpyCells
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn
from gradserve_server.ops.cudnn_rnn.cpu.pseudo_layer import BackwardScan, ForwardScan, Step
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import ForwardAttributes
from tests.ops.cudnn_rnn.random_calls import Call, DirtyDevice, Numbers, numbers

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
ENDED_AT = 7


@pytest.fixture(scope="module")
def kernels(_compiled_kernels: None) -> Iterator[CpuCudnnRnn]:
    parallel = ForkJoin(2)
    prepared = CpuCudnnRnn(DirtyDevice(BufferPool(1 << 26)), parallel, ReserveKey(Numbers()))
    prepared.prepare(lambda: False)
    yield prepared
    parallel.close()


class CancellingCells(NumpyCells):
    """Counts the steps of all scans, and cancels their call in one of them."""

    def __init__(self, cancellation: Cancellation) -> None:
        self._cancellation = cancellation
        self.count = 0

    def forward_step(self, scan: ForwardScan, rows: slice) -> Step:
        return self._counting(super().forward_step(scan, rows))

    def backward_step(self, scan: BackwardScan, rows: slice) -> Step:
        return self._counting(super().backward_step(scan, rows))

    def _counting(self, do_step: Step) -> Step:
        def step(number: int) -> None:
            do_step(number)
            self.count += 1
            if self.count == ENDED_AT:
                self._cancellation.cancel(UnavailableError("enough"))

        return step


@pytest.mark.parametrize("given", [{"rnn_mode": mode} for mode in MODES] + [{"num_proj": 2}], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_ends_after_the_step_in_which_it_was_cancelled(
    kernels: CpuCudnnRnn, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], direction: str
) -> None:
    call = Call(ForwardAttributes(**given), steps=10)
    forward = kernels.forward(call.inputs, call.problem)
    cancellation = Cancellation()
    cells = CancellingCells(cancellation)
    monkeypatch.setattr("gradserve_server.ops.cudnn_rnn.cpu.family.KernelCells", lambda *_: cells)
    compute: dict[str, Callable[[], object]] = {
        "forward": lambda: kernels.forward(call.inputs, call.problem),
        "backward": lambda: kernels.backprop(call.backprop_inputs(forward), call.problem),
    }
    with pytest.raises(UnavailableError, match="enough"):
        cancellation.run(compute[direction])
    assert cells.count == ENDED_AT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_once", [1, 3])
def test_scans_in_stretches_give_the_same_bits(
    kernels: CpuCudnnRnn, monkeypatch: pytest.MonkeyPatch, mode: str, at_once: int
) -> None:
    attributes = ForwardAttributes(rnn_mode=mode, direction="bidirectional")
    call = Call(attributes, steps=10, batch=2, units=5, lengths=[10, 4], dtype=np.float32)
    expected = numbers(*call.run(kernels))
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1

    weights = call.problem.network.gates_size * call.problem.network.num_units
    monkeypatch.setattr(kernel_cells, "_PRODUCTS_AT_ONCE", at_once * 2 * weights)
    monkeypatch.setattr(kernel_cells, "checkpoint", counted)
    for name, array in numbers(*call.run(kernels)).items():
        np.testing.assert_array_equal(array, expected[name], name)
    passes = 0 if mode == "lstm" else 8  # those of an lstm are shared kernels, which have their own
    assert count == passes * -(-10 // at_once)
