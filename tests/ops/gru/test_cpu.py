"""GRUBlockCell on the host gives what the reference gives in float64."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.gru.cpu import CpuGRU
from gradserve_server.ops.gru.reference import gru_block_cell, gru_block_cell_grad
from gradserve_server.ops.gru.spec import CellInputs, GradAttributes, GradInputs, Sizes
from tests.golden.gru_block_cell import (
    ForwardCase,
    GradientCase,
    assert_outputs,
    load_forward_cases,
    load_gradient_cases,
)
from tests.servers.polling import PATIENCE_SECONDS

TOLERANCES = {np.float32: 1e-5, np.float64: 1e-12, np.float16: 2**-10, ml_dtypes.bfloat16: 2**-7}
"""Of an output, relative to its largest magnitude."""
SIZES = [
    Sizes(1, 1, 1),
    Sizes(1, 300, 700),
    Sizes(1, 0, 5),
    Sizes(1, 5, 0),
    Sizes(1, 130, 257),
    Sizes(37, 53, 41),
    Sizes(130, 77, 129),  # several chunks of rows, and products in parts
    Sizes(0, 3, 4),
    Sizes(5, 0, 6),
    Sizes(5, 6, 0),
    Sizes(0, 0, 0),
]
ALL = GradAttributes(weight_gradients=True)
by_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES))


@pytest.fixture(scope="module")
def gru(parallel: ForkJoin, _compiled_kernels: None) -> CpuGRU:
    prepared = unprepared(parallel)
    prepared.prepare(lambda: False)
    return prepared


def unprepared(parallel: ForkJoin) -> CpuGRU:
    return CpuGRU(CpuDevice(BufferPool(1 << 26)), parallel)


def make_inputs(sizes: Sizes, dtype: Any) -> GradInputs:
    random = np.random.default_rng(1)
    rows, state = sizes.inputs + sizes.cells, (sizes.batch, sizes.cells)
    scale = max(rows, 1) ** -0.5
    arrays = {
        "x": random.standard_normal((sizes.batch, sizes.inputs)),
        "h_prev": random.standard_normal(state),
        "w_ru": scale * random.standard_normal((rows, 2 * sizes.cells)),
        "w_c": scale * random.standard_normal((rows, sizes.cells)),
        "b_ru": random.standard_normal(2 * sizes.cells),
        "b_c": random.standard_normal(sizes.cells),
        "r": random.uniform(0, 1, state),
        "u": random.uniform(0, 1, state),
        "c": random.uniform(-1, 1, state),
        "d_h": random.standard_normal(state),
    }
    return GradInputs(**{name: array.astype(np.float32).astype(dtype) for name, array in arrays.items()})


def cell_inputs(inputs: GradInputs) -> CellInputs:
    return CellInputs(**{name: getattr(inputs, name) for name in CellInputs.__dataclass_fields__})


def widened(inputs: Any) -> Any:
    return type(inputs)(**{name: array.astype(np.float64) for name, array in vars(inputs).items()})


def assert_near(outputs: Any, expected: Any, dtype: Any) -> None:
    for name, output in vars(outputs).items():
        wanted: NDArray[Any] = getattr(expected, name)
        assert (output.dtype, output.shape) == (dtype, wanted.shape), name
        largest = np.max(np.abs(wanted), initial=0)
        np.testing.assert_allclose(
            output.astype(np.float64), wanted, rtol=0, atol=TOLERANCES[dtype] * largest, err_msg=name
        )


@pytest.mark.parametrize("case", load_forward_cases(), ids=str)
def test_cell_beside_tensorflow(gru: CpuGRU, case: ForwardCase) -> None:
    assert_outputs(case, gru.cell(case.inputs, case.plan.sizes))


@pytest.mark.parametrize("case", load_gradient_cases(), ids=str)
def test_gradient_beside_tensorflow(gru: CpuGRU, case: GradientCase) -> None:
    assert_outputs(case, gru.gradient(case.inputs, ALL, case.plan.sizes))


@pytest.mark.sampled
@by_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cell_like_the_reference(gru: CpuGRU, sizes: Sizes, dtype: Any) -> None:
    inputs = cell_inputs(make_inputs(sizes, dtype))
    assert_near(gru.cell(inputs, sizes), gru_block_cell(np, widened(inputs), sizes), dtype)


@pytest.mark.sampled
@by_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradient_like_the_reference(gru: CpuGRU, sizes: Sizes, dtype: Any) -> None:
    inputs = make_inputs(sizes, dtype)
    outputs = gru.gradient(inputs, ALL, sizes)
    assert_near(outputs, gru_block_cell_grad(np, widened(inputs), ALL, sizes), dtype)
    fewer = gru.gradient(inputs, GradAttributes(), sizes)
    for name, output in list(vars(fewer).items())[:4]:
        np.testing.assert_array_equal(output, getattr(outputs, name), err_msg=name)
    assert list(vars(fewer).values())[4:] == [None] * 4


@pytest.mark.sampled
@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("kind", ["random", "always the same"])
@pytest.mark.parametrize("batch", [300, 30_000])
def test_sums_over_a_large_batch(gru: CpuGRU, parallel: ForkJoin, batch: int, kind: str, *, is_prepared: bool) -> None:
    """As exact as docs/rnn_accuracy.md says; of what is always the same, every addition is rounded to one side."""
    sizes = Sizes(batch, 9, 7)
    inputs = make_inputs(sizes, np.float32)
    if kind == "always the same":
        for array in vars(inputs).values():
            array[...] = array[:1]
    outputs = (gru if is_prepared else unprepared(parallel)).gradient(inputs, ALL, sizes)
    expected = gru_block_cell_grad(np, widened(inputs), ALL, sizes)
    for name in ("d_w_ru", "d_w_c", "d_b_ru", "d_b_c"):
        wanted = getattr(expected, name)
        tolerance = (1e-5 if kind == "always the same" else 5e-7) * np.abs(wanted).max()
        np.testing.assert_allclose(getattr(outputs, name), wanted, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("chunk_elements", [1, 17])
def test_rows_of_more_than_a_chunk(gru: CpuGRU, monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(gru, "_chunk_elements", chunk_elements)
    sizes = Sizes(13, 7, 9)
    inputs = make_inputs(sizes, np.float16)
    assert_near(gru.gradient(inputs, ALL, sizes), gru_block_cell_grad(np, widened(inputs), ALL, sizes), np.float16)
    cells = cell_inputs(inputs)
    assert_near(gru.cell(cells, sizes), gru_block_cell(np, widened(cells), sizes), np.float16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gates_over_their_whole_range(gru: CpuGRU, dtype: Any) -> None:
    """Without weights the biases are all: sigmoid and tanh to a few units in the last place."""
    biases = np.concatenate([np.linspace(-80, 80, 801), np.geomspace(1e-30, 1, 100), -np.geomspace(1e-30, 1, 100)])
    biases = biases.astype(dtype)
    cells = biases.size
    inputs = CellInputs(
        x=np.zeros((1, 0), dtype),
        h_prev=np.zeros((1, cells), dtype),
        w_ru=np.zeros((cells, 2 * cells), dtype),
        w_c=np.zeros((cells, cells), dtype),
        b_ru=np.concatenate([biases, biases]),
        b_c=biases,
    )
    outputs = gru.cell(inputs, Sizes(1, 0, cells))
    wide = biases.astype(np.longdouble)
    precision = 4 * np.finfo(dtype).eps
    for output, expected in ((outputs.r, 1 / (1 + np.exp(-wide))), (outputs.c, np.tanh(wide))):
        np.testing.assert_allclose(output[0].astype(np.longdouble), expected, rtol=precision, atol=0)
    np.testing.assert_array_equal(outputs.u, outputs.r)


@by_dtype
def test_what_is_not_finite(gru: CpuGRU, dtype: Any) -> None:
    """NaN and infinities go where the reference lets them go, and nothing is warned of."""
    sizes = Sizes(6, 3, 5)
    inputs = make_inputs(sizes, dtype)
    for row, value in enumerate((np.nan, np.inf, -np.inf)):
        inputs.x[row, row] = value
        inputs.d_h[row + 3, row] = value
    cells = cell_inputs(inputs)
    with np.errstate(all="ignore"):
        expected_cell = gru_block_cell(np, cells, sizes)
        expected_grad = gru_block_cell_grad(np, inputs, ALL, sizes)
    for outputs, expected in (
        (gru.cell(cells, sizes), expected_cell),
        (gru.gradient(inputs, ALL, sizes), expected_grad),
    ):
        for name, output in vars(outputs).items():
            finite = np.isfinite(getattr(expected, name).astype(np.float32))
            np.testing.assert_array_equal(np.isfinite(output.astype(np.float32)), finite, err_msg=name)


@by_dtype
def test_inputs_may_be_read_only_and_not_aligned(gru: CpuGRU, dtype: Any) -> None:
    sizes = Sizes(7, 5, 6)
    inputs = make_inputs(sizes, dtype)

    def unaligned(array: NDArray[Any]) -> NDArray[Any]:
        memory = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:]
        return memory.view(array.dtype).reshape(array.shape)

    moved = GradInputs(**{name: unaligned(array) for name, array in vars(inputs).items()})
    assert not moved.x.flags.aligned
    assert not moved.x.flags.writeable
    expected = gru.gradient(inputs, ALL, sizes)
    for name, output in vars(gru.gradient(moved, ALL, sizes)).items():
        np.testing.assert_array_equal(output, getattr(expected, name), err_msg=name)
    np.testing.assert_array_equal(
        gru.cell(cell_inputs(moved), sizes).h, gru.cell(cell_inputs(inputs), sizes).h, err_msg="h"
    )


@pytest.mark.usefixtures("_compiled_kernels")
def test_a_batch_of_one_gives_the_same_bits_on_any_number_of_threads() -> None:
    sizes = Sizes(1, 300, 700)
    inputs, states = cell_inputs(make_inputs(sizes, np.float32)), []
    for num_threads in (1, 2, 5):
        threads = ForkJoin(num_threads)
        prepared = unprepared(threads)
        prepared.prepare(lambda: False)
        states += [prepared.cell(inputs, sizes).h for _ in range(5)]
        threads.close()
    for state in states[1:]:
        np.testing.assert_array_equal(state, states[0])


def test_several_threads_at_once(gru: CpuGRU) -> None:
    calls = [(sizes, make_inputs(sizes, np.float32)) for sizes in (Sizes(130, 77, 129), Sizes(37, 53, 41))]

    def gradient_of_weights(sizes: Sizes, inputs: GradInputs) -> NDArray[Any]:
        gradient: NDArray[Any] | None = gru.gradient(inputs, ALL, sizes).d_w_ru
        assert gradient is not None
        return gradient

    expected = [gradient_of_weights(*call) for call in calls]
    start = threading.Barrier(4)

    def work(first: int) -> bool:
        start.wait()
        order = [(first + i) % 2 for i in range(20)]
        return all(np.array_equal(gradient_of_weights(*calls[i]), expected[i]) for i in order)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


@pytest.mark.sampled
@by_dtype
@pytest.mark.parametrize("num_checks", [0, 1, 7, 11, 12, 13])
def test_calls_are_right_before_all_is_prepared(parallel: ForkJoin, dtype: Any, num_checks: int) -> None:
    checks = iter([False] * num_checks)
    gru = unprepared(parallel)
    gru.prepare(lambda: next(checks, True))
    sizes = Sizes(7, 5, 6)
    inputs = make_inputs(sizes, dtype)
    assert_near(gru.gradient(inputs, ALL, sizes), gru_block_cell_grad(np, widened(inputs), ALL, sizes), dtype)
    cells = cell_inputs(inputs)
    assert_near(gru.cell(cells, sizes), gru_block_cell(np, widened(cells), sizes), dtype)


def test_numba_is_imported_by_preparing_alone() -> None:
    program = "import sys, gradserve_server.ops.gru.cpu; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)
