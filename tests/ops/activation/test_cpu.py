"""Activation functions on the host give what their definitions say, to some units in the last place."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.activation.cpu import CpuActivation
from gradserve_server.ops.activation.reference import activation
from gradserve_server.ops.activation.spec import NAMES, gradient_of_result
from gradserve_server.tensors.spec import FLOAT32
from tests.ops.activation.cases import DTYPES, assert_forward, assert_gradient, saved_for_gradient, values
from tests.servers.polling import PATIENCE_SECONDS

by_name = pytest.mark.parametrize("name", NAMES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def family(parallel: ForkJoin, _compiled_kernels: None) -> CpuActivation:
    prepared = CpuActivation(parallel)
    prepared.prepare(lambda: False)
    return prepared


@pytest.fixture(scope="module")
def on_threads(_compiled_kernels: None) -> Iterator[Mapping[int, CpuActivation]]:
    """By how many threads it computes with."""
    fork_joins = {num_threads: ForkJoin(num_threads) for num_threads in (1, 5)}
    families = {num_threads: CpuActivation(fork_join) for num_threads, fork_join in fork_joins.items()}
    for each in families.values():
        each.prepare(lambda: False)
    yield families
    for fork_join in fork_joins.values():
        fork_join.close()


def forward(family: CpuActivation, name: str, x: NDArray[Any]) -> NDArray[Any]:
    out = np.empty_like(x)
    family.forward(name, x, out)
    return out


def gradient(family: CpuActivation, name: str, dy: NDArray[Any], saved: NDArray[Any]) -> NDArray[Any]:
    out = np.empty_like(dy)
    family.gradient(name, dy, saved, out)
    return out


def gradients_of(x: NDArray[Any]) -> NDArray[Any]:
    return drawn(x.shape, x.dtype, seed=0)


def drawn(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 1) -> NDArray[Any]:
    return np.asarray(np.random.default_rng(seed).normal(0, 3, shape), np.float32).astype(dtype)


def saved_of(name: str, x: NDArray[Any]) -> NDArray[Any]:
    """What `gradient` takes, of an x too large for the definitions."""
    return activation(np, name, x) if gradient_of_result(name) else x


@pytest.mark.sampled
@by_dtype
@by_name
def test_forward_by_the_definition(family: CpuActivation, name: str, dtype: np.dtype[Any]) -> None:
    x = values(dtype)
    assert_forward(name, x, forward(family, name, x))


@pytest.mark.sampled
@by_dtype
@by_name
def test_gradient_by_the_definition(family: CpuActivation, name: str, dtype: np.dtype[Any]) -> None:
    x = values(dtype)
    dy, saved = gradients_of(x), saved_for_gradient(name, x)
    assert_gradient(name, dy, saved, gradient(family, name, dy, saved))


@pytest.mark.sampled
@by_dtype
@by_name
@pytest.mark.parametrize("is_prepared", [True, False], ids=["kernels", "reference"])
def test_in_place(
    family: CpuActivation, parallel: ForkJoin, name: str, dtype: np.dtype[Any], is_prepared: bool
) -> None:
    used = family if is_prepared else CpuActivation(parallel)
    x = drawn((3, 33333), dtype)
    expected, out = forward(used, name, x), x.copy()
    used.forward(name, out, out)
    np.testing.assert_array_equal(out, expected)
    dy, saved = gradients_of(x), saved_of(name, x)
    expected = gradient(used, name, dy, saved)
    for replaced in (0, 1):
        pair = [dy.copy(), saved.copy()]
        used.gradient(name, pair[0], pair[1], pair[replaced])
        np.testing.assert_array_equal(pair[replaced], expected)
        np.testing.assert_array_equal(pair[1 - replaced], [dy, saved][1 - replaced])


@pytest.mark.sampled
@by_dtype
@by_name
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)], ids=str)
def test_shapes(family: CpuActivation, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    x = drawn(shape, dtype)
    assert_forward(name, x, forward(family, name, x))
    dy, saved = gradients_of(x), saved_for_gradient(name, x)
    assert_gradient(name, dy, saved, gradient(family, name, dy, saved))


@pytest.mark.sampled
@by_dtype
@by_name
def test_the_number_of_threads_changes_no_bits(
    on_threads: Mapping[int, CpuActivation], name: str, dtype: np.dtype[Any]
) -> None:
    x = drawn((300_001,), dtype)
    dy, saved = gradients_of(x), saved_of(name, x)
    alone, many = (
        (forward(used, name, x).tobytes(), gradient(used, name, dy, saved).tobytes()) for used in on_threads.values()
    )
    assert alone == many


@pytest.mark.sampled
@pytest.mark.parametrize("chunk_elements", [1, 17, 5000])
@by_dtype
def test_several_chunks(
    family: CpuActivation, monkeypatch: pytest.MonkeyPatch, chunk_elements: int, dtype: np.dtype[Any]
) -> None:
    monkeypatch.setattr(family, "_chunk_elements", chunk_elements)
    x = drawn((12_345 if chunk_elements > 1 else 123,), dtype)
    assert_forward("elu", x, forward(family, "elu", x))
    dy = gradients_of(x)
    assert_gradient("softplus", dy, x, gradient(family, "softplus", dy, x))


@by_dtype
def test_arrays_may_be_read_only_and_not_aligned(family: CpuActivation, dtype: np.dtype[Any]) -> None:
    x = drawn((1001,), dtype)
    dy = gradients_of(x)

    def unaligned(array: NDArray[Any]) -> NDArray[Any]:
        return np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype)

    def unaligned_and_empty() -> NDArray[Any]:
        return np.empty(x.nbytes + 1, np.uint8)[1:].view(dtype)

    for moved_x, moved_dy in ((unaligned(x), unaligned(dy)), (x, dy)):
        for out in (np.empty_like(x), unaligned_and_empty()):
            family.forward("gelu", moved_x, out)
            assert_forward("gelu", x, out.copy())
            family.gradient("gelu", moved_dy, moved_x, out)
            assert_gradient("gelu", dy, x, out.copy())


def test_several_threads_at_once(family: CpuActivation) -> None:
    x = drawn((200_000,), FLOAT32)
    expected = {name: forward(family, name, x).tobytes() for name in NAMES}
    start = threading.Barrier(4)

    def work(first: int) -> bool:
        start.wait()
        order = [NAMES[(first + step) % len(NAMES)] for step in range(2 * len(NAMES))]
        return all(forward(family, name, x).tobytes() == expected[name] for name in order)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


@by_dtype
@pytest.mark.parametrize("num_checks", range(6))
def test_calls_are_right_before_all_is_prepared(parallel: ForkJoin, dtype: np.dtype[Any], num_checks: int) -> None:
    checks = iter([False] * num_checks)
    family = CpuActivation(parallel)
    family.prepare(lambda: next(checks, True))
    x = drawn((1001,), dtype)
    assert_forward("swish", x, forward(family, "swish", x))
    dy = gradients_of(x)
    assert_gradient("swish", dy, x, gradient(family, "swish", dy, x))


def test_numba_is_imported_by_preparing_alone() -> None:
    program = "import sys, gradserve_server.ops.activation.cpu; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)
