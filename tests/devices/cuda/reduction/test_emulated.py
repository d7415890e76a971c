"""The CUDA kernels of sums, run on the CPU, give the bits of the host's `Reducer`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.arrays import DoesNotFitError, converted
from gradserve_server.devices.cuda import reduction as kernels
from gradserve_server.devices.cuda.programs import CompiledProgram, Limits, Program
from gradserve_server.devices.cuda.reduction import KEYS, SUMS, CudaReducer, SumsKey, program
from gradserve_server.devices.device import Place
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from tests.devices.cuda.emulation.device import H200, EmulatedDevice
from tests.devices.cuda.reduction.one_program import ReductionDevice

Array = NDArray[Any]

FLOATING = [np.dtype(each) for each in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
SIZES = [5, 0, 1, 37, 4096, 8193, 20_011, 1000]
"""Smaller and larger than a tile, whole ones and others."""
HARD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, -1e-7, 65504.0, 65520.0, 1e-41, -1e-45, 3e-39, 5e-324, 1.0000000001]
"""With subnormal numbers of every dtype."""
PLACES = [(0, 0), (1, 2), (7, 0)]
"""Elements by which arrays are apart from an address that vectors can be loaded from, and the order of blocks."""

pairs = pytest.mark.parametrize("key", SUMS, ids=lambda key: f"{key.gradient}-{key.total}")
places = pytest.mark.parametrize(("shift", "seed"), PLACES)


def arrays(dtype: np.dtype[Any], seed: int, sizes: Sequence[int] = SIZES) -> list[Array]:
    rng = np.random.default_rng(seed)
    made = []
    with np.errstate(all="ignore"):
        for size in sizes:
            values = rng.standard_normal(size) * 10.0 ** rng.integers(-9, 5, size)
            values[: len(HARD)] = HARD[:size]
            values[-1:] *= 1e-40
            made.append(values.astype(dtype))
    return made


def device_of(folder: Path, seed: int = 0) -> EmulatedDevice:
    return ReductionDevice(folder, Limits(3, 0, element_blocks=2), seed)


def there(device: EmulatedDevice, lists: Sequence[Array], shift: int = 0) -> list[Array]:
    """Copies on the device: each array begins some more elements behind an address for vectors than the one before."""
    copies = []
    for index, array in enumerate(lists):
        offset = shift * (index + 1) % 8
        memory = device.empty((array.size + offset,), array.dtype)
        memory[offset:] = array
        copies.append(memory[offset:])
    return copies


def assert_same_bits(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """But for those of NaN."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        bits = np.dtype(f"u{one.dtype.itemsize}")
        is_nan = np.isnan(one.astype(np.float64))
        np.testing.assert_array_equal(is_nan, np.isnan(other.astype(np.float64)))
        np.testing.assert_array_equal(one.view(bits)[~is_nan], other.view(bits)[~is_nan])


@pytest.fixture(scope="module")
def host() -> Reducer:
    return Reducer(ForkJoin(1))


@pairs
@places
def test_a_round_of_sums(compiled: Path, host: Reducer, key: SumsKey, shift: int, seed: int) -> None:
    device = device_of(compiled, seed)
    reducer = CudaReducer(device)
    first, second, third = (arrays(key.gradient, number) for number in range(3))
    sums = [np.empty(each.size, key.total) for each in first]
    outs = [np.empty(each.size, key.gradient) for each in first]
    its_sums, its_outs = there(device, sums, shift), there(device, outs, 2 * shift)
    for own, total, out, memory in ((host, sums, outs, None), (reducer, its_sums, its_outs, device)):
        given = [each if memory is None else there(memory, each, shift) for each in (first, second, third)]
        own.scale(given[0], 0.3, total)
        own.add_scaled(total, given[1], 3.0)
        # The host's changes the sums.
        own.add_and_divide([each.copy() for each in total] if memory is None else total, given[2], 0.7, 3.0, out)
    assert_same_bits(its_sums, sums)
    assert_same_bits(its_outs, outs)
    host.divide(sums, 7.0, outs)
    reducer.divide(its_sums, 7.0, its_outs)
    assert_same_bits(its_outs, outs)
    device.check_margins()


@pairs
def test_sums_in_place(compiled: Path, host: Reducer, key: SumsKey) -> None:
    device = device_of(compiled, 3)
    reducer = CudaReducer(device)
    sums, its = arrays(key.total, 4), there(device, arrays(key.total, 4), 1)
    for own, total, given in (
        (host, sums, arrays(key.gradient, 5)),
        (reducer, its, there(device, arrays(key.gradient, 5))),
    ):
        own.scale(total, 1.0, total)
        own.scale(total, 0.3, total)
        own.add_and_divide(total, given, 1.0, 3.0, total)
        own.divide(total, 1.0, total)
        own.divide(total, 0.1, total)
    assert_same_bits(its, sums)
    device.check_margins()


@pairs
@pytest.mark.parametrize("count", [1, 2, 16, 17, 40])
def test_gradients_are_added_up_in_one_pass_for_sixteen(
    compiled: Path, host: Reducer, key: SumsKey, count: int
) -> None:
    sizes = [1, 4100, 37]
    gradients = [arrays(key.gradient, number, sizes) for number in range(count)]
    factors = [0.5 + 0.1 * number for number in range(count)]
    device = device_of(compiled, count)
    found = {}
    for in_place in (False, True):
        reducer, dtypes = CudaReducer(device), [key.total] * len(sizes)
        totals = [device.empty((size,), key.total) for size in sizes]
        outs = totals if in_place else [device.empty((size,), key.gradient) for size in sizes]
        device.launched.clear()
        given = [there(device, each, 1) for each in gradients]
        reducer.add_up(given, factors, 3.0, dtypes, totals if reducer.needs_totals(count) else None, outs)
        assert len(device.launched) == -(-count // 16)
        found[in_place] = outs
    sums = [np.empty(size, key.total) for size in sizes]
    host.scale(gradients[0], factors[0], sums)
    for each, factor in zip(gradients[1:], factors[1:], strict=True):
        host.add_scaled(sums, each, factor)
    outs = [np.empty(size, key.gradient) for size in sizes]
    host.divide(sums, 3.0, outs)
    assert_same_bits(found[False], outs)
    host.divide(sums, 3.0, sums)
    assert_same_bits(found[True], sums)
    device.check_margins()


def test_the_host_adds_up_likewise(host: Reducer) -> None:
    gradients = [[np.array([value, 2 * value], np.float16)] for value in (1, 2, 3)]
    sums, outs = [np.empty(2, np.float32)], [np.empty(2, np.float16)]
    dtypes = [sums[0].dtype]
    host.add_up(gradients, [1.0, 2.0, 0.5], 4.0, dtypes, sums, outs)
    assert outs[0].tolist() == [1.625, 3.25]
    host.add_up(gradients[:1], [3.0], 1.5, dtypes, sums, sums)
    assert sums[0].tolist() == [2, 4]


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("count", [80, 81, 1000])
def test_many_arrays_take_one_launch(compiled: Path, count: int, *, is_full: bool) -> None:
    class Full(ReductionDevice):
        def from_host(self, array: Array) -> Array:
            raise MemoryError("no room for a table")

    device = (Full if is_full else ReductionDevice)(compiled, H200, 5)
    sizes = [1 + number % 7 for number in range(count)]
    totals = there(device, [np.full(size, number, np.float32) for number, size in enumerate(sizes)])
    sources = there(device, [np.full(size, 1, np.float32) for size in sizes])
    CudaReducer(device).add_scaled(totals, sources, 2.0)
    assert len(device.launched) == (-(-count // 80) if is_full else 1)
    assert all(set(total.tolist()) == {number + 2} for number, total in enumerate(totals))
    device.check_margins()


def test_a_launch_for_each_pair_of_dtypes(compiled: Path) -> None:
    device = device_of(compiled)
    dtypes = [np.float32, np.float16, np.float64, np.float32]
    sources = there(device, [np.full(100, index, dtype) for index, dtype in enumerate(dtypes)])
    wide = [np.float64 if dtype == np.float64 else np.float32 for dtype in dtypes]
    sums = there(device, [np.full(100, 10, dtype) for dtype in wide])
    CudaReducer(device).add_scaled(sums, sources, 2.0)
    assert [set(each.tolist()) for each in sums] == [{10}, {12}, {14}, {16}]
    assert len(device.launched) == 3


def test_nothing(compiled: Path) -> None:
    device = device_of(compiled)
    reducer = CudaReducer(device)
    empty = device.empty((0, 3), np.dtype(np.float32))
    reducer.scale([], 2.0, [])
    reducer.add_scaled([empty], [empty], 2.0)
    reducer.divide([empty], 2.0, [empty])
    reducer.add_up([[empty]], [1.0], 2.0, [empty.dtype], None, [empty])
    assert reducer.first_non_finite([empty]) is None
    assert reducer.converted(empty, np.dtype(np.float16))[1] is None
    assert device.launched == []


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@places
def test_the_first_value_that_is_not_finite(compiled: Path, dtype: Any, bad: float, shift: int, seed: int) -> None:
    device = device_of(compiled, seed)
    reducer = CudaReducer(device)
    largest = ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]
    clean = there(device, [np.full(size, largest, dtype) for size in SIZES], shift)
    assert reducer.first_non_finite(clean) is None
    for array, position in [(7, 999), (6, 20_010), (6, 8191), (5, 8192), (5, 0), (3, 36), (2, 0), (0, 1)]:
        clean[array][position] = bad
        assert reducer.first_non_finite(clean) == Place(array, position)


def test_the_first_one_among_several_dtypes(compiled: Path) -> None:
    device = device_of(compiled)
    mixed = there(device, [np.zeros(9, dtype) for dtype in (np.float32, np.float16, np.float32, np.float16)])
    mixed[3][2] = mixed[2][5] = np.inf
    assert CudaReducer(device).first_non_finite(mixed) == Place(2, 5)


@pytest.mark.parametrize("source", FLOATING, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@places
def test_conversions(compiled: Path, source: Any, dtype: Any, shift: int, seed: int) -> None:
    if source == dtype:
        return
    device = device_of(compiled, seed)
    for values in arrays(source, 6):
        (its,) = there(device, [values], shift)
        out, lost = CudaReducer(device).converted(its, dtype)
        try:
            assert_same_bits([out], [converted(values, dtype)])
            assert lost is None
        except DoesNotFitError:
            with np.errstate(all="ignore"):
                narrow = values.astype(dtype)
            assert_same_bits([out], [narrow])
            assert lost == np.argmax(np.isinf(narrow.astype(np.float64)) & np.isfinite(values.astype(np.float64)))
    device.check_margins()


@pytest.mark.parametrize("dtype", FLOATING[:2], ids=str)
def test_every_double_near_a_tie_is_rounded_as_on_the_host(compiled: Path, dtype: Any) -> None:
    device = device_of(compiled)
    narrow = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        wide = narrow[np.isfinite(narrow.astype(np.float64))].astype(np.float64)
        ties = (wide[:-1] + wide[1:]) / 2
        near = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), ties * (1 + 1e-9)])
        expected = near.astype(dtype)
    out, _ = CudaReducer(device).converted(there(device, [near])[0], dtype)
    assert_same_bits([out], [expected])


FAULTS = {
    "products are not rounded": ("return rounded<S>(product(", "return (product("),
    "a row begins too late": ("first_tile(row + 1) <= tile", "first_tile(row + 1) < tile"),
    "the tail is left out": ("extent.tail + threadIdx.x < extent.end", "false"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(compiled: Path, host: Reducer, fault: str) -> None:
    right, wrong = FAULTS[fault]
    key = SumsKey(np.dtype(np.float16), np.dtype(np.float16))

    class Faulty(EmulatedDevice):
        def compiled(self, program: Program) -> CompiledProgram:
            assert right in program.source
            return super().compiled(Program(program.name, program.source.replace(right, wrong), program.kernels))

    device = Faulty(compiled, Limits(3, 0, element_blocks=2), 2)
    sums, its = arrays(key.total, 4), there(device, arrays(key.total, 4), 1)
    with pytest.raises(AssertionError):  # noqa: PT012 - whichever of them notices
        CudaReducer(device).add_scaled(its, there(device, arrays(key.gradient, 5)), 0.3)
        host.add_scaled(sums, arrays(key.gradient, 5), 0.3)
        assert_same_bits(its, sums)
        device.check_margins()


def test_every_pair_of_dtypes_has_a_program() -> None:
    assert {(key.gradient, key.total) for key in SUMS} == {
        (gradient, total) for gradient in FLOATING for total in FLOATING if np.can_cast(gradient, total, "safe")
    }
    assert len(KEYS) == 13
    assert all(program(key).kernels for key in KEYS)
    assert all(argument.itemsize <= 4096 for argument in (kernels.COMBINE, kernels.CHECK))
