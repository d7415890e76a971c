"""LayerNorm on the host gives what PyTorch and the reference give in float64."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.layer_norm.cpu import CpuLayerNorm
from gradserve_server.ops.layer_norm.reference import layer_norm, layer_norm_grad
from gradserve_server.ops.layer_norm.spec import ForwardAttributes, ForwardInputs, Geometry, GradInputs
from tests.golden.layer_norm import Case, assert_outputs, load_cases
from tests.ops.layer_norm.accuracy import NAMES, assert_sums_within_bounds
from tests.ops.layer_norm.random_calls import ATTRIBUTES, check, make_inputs, raw_bytes, widened
from tests.servers.polling import PATIENCE_SECONDS

SIZES = [
    (1, 1),
    (1, 700),
    (500, 1),
    (33, 15),
    (33, 16),
    (65, 17),
    (7, 1024),
    (5, 3001),  # several blocks
    (1100, 64),  # several chunks
    (1, 70_001),  # parts of groups
    (40, 2100),  # parts of groups in the gradient alone
    (0, 5),
    (4, 0),
    (0, 0),
]
"""Groups, and their elements."""
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]

by_case = pytest.mark.parametrize("case", load_cases(), ids=str)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
by_sizes = pytest.mark.parametrize(("groups", "size"), SIZES)


@pytest.fixture(scope="module")
def family(parallel: ForkJoin, _compiled_kernels: None) -> CpuLayerNorm:
    prepared = unprepared(parallel)
    prepared.prepare(lambda: False)
    return prepared


def unprepared(parallel: ForkJoin) -> CpuLayerNorm:
    return CpuLayerNorm(CpuDevice(BufferPool(1 << 26)), parallel)


def check_calls(family: CpuLayerNorm, groups: int, size: int, dtype: Any) -> bytes:
    return check(family.forward, family.gradient, groups, size, dtype)


@by_case
def test_beside_pytorch(family: CpuLayerNorm, case: Case) -> None:
    assert_outputs(case, family.forward(case.inputs, case.attributes, case.geometry))
    assert_outputs(case, family.gradient(case.grad_inputs, case.geometry))


@pytest.mark.sampled
@by_dtype
@by_sizes
def test_like_the_reference(family: CpuLayerNorm, groups: int, size: int, dtype: Any) -> None:
    check_calls(family, groups, size, dtype)


@pytest.mark.sampled
@by_dtype
@pytest.mark.parametrize("num_checks", [0, 1, 5, 11])
def test_calls_are_right_before_all_is_prepared(parallel: ForkJoin, dtype: Any, num_checks: int) -> None:
    checks = iter([False] * num_checks)
    family = unprepared(parallel)
    family.prepare(lambda: next(checks, True))
    check_calls(family, 7, 50, dtype)


@by_dtype
@pytest.mark.parametrize(("groups", "size"), [(2111, 70), (1, 200_000), (3, 70_001), (40, 5000)])
def test_any_number_of_threads_gives_the_same_bits(family: CpuLayerNorm, groups: int, size: int, dtype: Any) -> None:
    results = set()
    for num_threads in (1, 2, 5):
        threads = ForkJoin(num_threads)
        own = unprepared(threads)
        own._kernels, own._part_kernels = family._kernels, family._part_kernels
        results.add(check_calls(own, groups, size, dtype))
        threads.close()
    assert len(results) == 1


class Recorder(ForkJoin):
    """Notes how many threads could do each piece of work."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_parts: list[int] = []

    def run_shared(self, *arguments: Any) -> None:
        self.num_parts.append(arguments[-1])
        super().run_shared(*arguments)


@pytest.mark.parametrize(("groups", "size"), [(1, 200_000), (40, 5000)])
def test_few_long_groups_are_shared_once_the_kernels_for_that_are_ready(
    family: CpuLayerNorm, groups: int, size: int
) -> None:
    """Until then, the kernels of whole groups compute them, if these are ready."""
    recorder = Recorder()
    own = unprepared(recorder)
    own._kernels = family._kernels
    check_calls(own, groups, size, np.float32)
    assert min(recorder.num_parts) <= 2
    recorder.num_parts.clear()
    own._part_kernels = family._part_kernels
    check_calls(own, groups, size, np.float32)
    assert min(recorder.num_parts) >= 5


@pytest.mark.parametrize("chunk_elements", [1, 100])
def test_chunks_of_few_groups(family: CpuLayerNorm, monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(family, "_chunk_elements", chunk_elements)
    monkeypatch.setattr(family, "_min_gradient_groups", 3)
    check_calls(family, 100, 33, np.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("is_prepared", [True, False], ids=["kernels", "numpy"])
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_within_bounds(family: CpuLayerNorm, parallel: ForkJoin, name: str, *, is_prepared: bool) -> None:
    assert_sums_within_bounds(family if is_prepared else unprepared(parallel), name)


@pytest.mark.parametrize("is_prepared", [True, False], ids=["kernels", "numpy"])
def test_a_large_offset_costs_y_no_digits(family: CpuLayerNorm, parallel: ForkJoin, *, is_prepared: bool) -> None:
    """Though the mean, rounded to float32, is off by a thousandth of the standard deviation."""
    x = (1e5 + np.random.default_rng(4).integers(-2, 3, (3, 500)) / 8).astype(np.float32)
    ones = np.ones(500, np.float32)
    inputs, geometry = ForwardInputs(x, ones, 0 * ones), Geometry((3,), 500)
    outputs = (family if is_prepared else unprepared(parallel)).forward(inputs, ATTRIBUTES, geometry)
    expected = layer_norm(np, widened(inputs), ATTRIBUTES, geometry)
    assert np.abs(outputs.mean - expected.mean).max() > 1e-3 * x.std()
    np.testing.assert_allclose(outputs.y, expected.y, rtol=0, atol=1e-6)


@by_dtype
def test_what_is_not_finite(family: CpuLayerNorm, dtype: Any) -> None:
    """NaN and infinities stay in their groups, and nothing is warned of."""
    inputs, grad_inputs = make_inputs(6, 40, dtype)
    for group, value in enumerate((np.nan, np.inf, -np.inf)):
        inputs.x[group, group] = value
        grad_inputs.y_backprop[group + 3, group] = value
    geometry = Geometry((6,), 40)
    with np.errstate(all="ignore"):
        expected_forward = layer_norm(np, inputs, ATTRIBUTES, geometry)
        expected_gradient = layer_norm_grad(np, grad_inputs, geometry)
    for outputs, expected in (
        (family.forward(inputs, ATTRIBUTES, geometry), expected_forward),
        (family.gradient(grad_inputs, geometry), expected_gradient),
    ):
        for name, output in vars(outputs).items():
            finite = np.isfinite(getattr(expected, name).astype(np.float32))
            np.testing.assert_array_equal(np.isfinite(output.astype(np.float32)), finite, err_msg=name)


@by_dtype
@pytest.mark.parametrize("is_prepared", [True, False], ids=["kernels", "numpy"])
def test_equal_elements_without_epsilon_are_nan(
    family: CpuLayerNorm, parallel: ForkJoin, dtype: Any, *, is_prepared: bool
) -> None:
    """As in PyTorch; nothing is warned of."""
    inputs, _ = make_inputs(3, 20, dtype)
    inputs.x[...] = 3
    own = family if is_prepared else unprepared(parallel)
    outputs = own.forward(inputs, ForwardAttributes(0.0), Geometry((3,), 20))
    assert np.isnan(outputs.y.astype(np.float32)).all()
    assert (outputs.rstd == np.inf).all()
    assert (outputs.mean == 3).all()


@by_dtype
def test_inputs_may_be_read_only_and_not_aligned(family: CpuLayerNorm, dtype: Any) -> None:
    def unaligned(array: NDArray[Any]) -> NDArray[Any]:
        memory = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:]
        return memory.view(array.dtype).reshape(array.shape)

    def moved(inputs: Any) -> Any:
        return replace(inputs, **{name: unaligned(array) for name, array in vars(inputs).items()})

    geometry = Geometry((7,), 20)
    inputs, grad_inputs = make_inputs(7, 20, dtype)
    assert not moved(inputs).x.flags.aligned
    assert not moved(inputs).x.flags.writeable
    expected = family.forward(inputs, ATTRIBUTES, geometry)
    assert raw_bytes(family.forward(moved(inputs), ATTRIBUTES, geometry)) == raw_bytes(expected)
    expected_gradient = family.gradient(grad_inputs, geometry)
    assert raw_bytes(family.gradient(moved(grad_inputs), geometry)) == raw_bytes(expected_gradient)


def test_several_threads_at_once(family: CpuLayerNorm) -> None:
    calls: list[tuple[GradInputs, Geometry]] = [
        (make_inputs(groups, size, np.float32)[1], Geometry((groups,), size))
        for groups, size in ((2111, 70), (90, 400))
    ]
    expected = [raw_bytes(family.gradient(*call)) for call in calls]
    start = threading.Barrier(4)

    def work(first: int) -> bool:
        start.wait()
        order = [(first + i) % 2 for i in range(20)]
        return all(raw_bytes(family.gradient(*calls[i])) == expected[i] for i in order)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_numba_is_imported_by_preparing_alone() -> None:
    program = "import sys, gradserve_server.ops.layer_norm.cpu; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)
