"""Arrays in the memory of a GPU, of libraries that need not be installed for the tests."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
from gradserve.conversion import tensors
from gradserve.conversion.arrays import as_array
from gradserve.conversion.tensors import as_output, as_tensor, as_tensor_of
from gradserve_protocol.argument import Argument
from gradserve_protocol.gpu import GpuArray, GpuError
from tests.client.gpu.fake_gpu import STREAM, FakeGpu, aligned
from tests.conversion.stand_ins import CUDA, set_type_code

W = Argument("component 'w'")
_BOOL, _BFLOAT = 6, 4


class Exported:
    """An array with DLPack, as CuPy's, PyTorch's and JAX's."""

    device = "cuda:0"

    def __init__(self, values: NDArray[Any], type_code: int | None = None) -> None:
        self.values = values
        self.dtype = values.dtype
        self.streams: list[Any] = []
        self._type_code = type_code

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        capsule: Any = self.values.__dlpack__()
        if self._type_code is not None:
            set_type_code(capsule, self._type_code)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA

    def get(self) -> NDArray[Any]:
        return self.values

    def copy(self) -> "Exported":
        copied = aligned(self.values.size, self.values.dtype).reshape(self.values.shape)
        copied[...] = self.values
        return Exported(copied)


class Torch(Exported):
    """Has PyTorch's methods, and refuses what PyTorch refuses."""

    requires_grad = True

    def detach(self) -> "Torch":
        made = Torch(self.values)
        made.requires_grad = False
        return made

    def __dlpack__(self, *, stream: Any = None) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient")
        return super().__dlpack__(stream=stream)

    def contiguous(self) -> "Torch":
        return self if self.values.flags.c_contiguous else self.clone()

    def clone(self) -> "Torch":
        made = Torch(Exported.copy(self).values)
        made.requires_grad = False
        return made

    def data_ptr(self) -> int:
        return int(self.values.ctypes.data)

    def cpu(self) -> NDArray[Any]:
        return self.values


class Interface:
    """An array with the CUDA Array Interface and nothing else, as Numba's."""

    def __init__(self, values: NDArray[Any], *, stream: int | None = 7, read_only: bool = False) -> None:
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (values.ctypes.data, read_only),
            "strides": None if values.flags.c_contiguous else values.strides,
            "version": 3,
            "stream": stream,
        }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    monkeypatch.setattr(tensors, "open_gpu", lambda _: made)
    return made


MATRIX = aligned(12).reshape(3, 4)
FOUND: dict[str, tuple[Callable[[], Any], NDArray[Any]]] = {
    "CuPy": (lambda: Exported(MATRIX), MATRIX),
    "PyTorch": (lambda: Torch(MATRIX), MATRIX),
    "Numba": (lambda: Interface(MATRIX), MATRIX),
    "no stream": (lambda: Interface(MATRIX, stream=None), MATRIX),
    "float64": (lambda: Exported(aligned(3, np.float64)), aligned(3, np.float64)),
    "int16": (lambda: Exported(aligned(3, np.int16)), aligned(3, np.int16)),
    "uint8": (lambda: Exported(aligned(3, np.uint8)), aligned(3, np.uint8)),
    "complex64": (lambda: Exported(aligned(3, np.complex64)), aligned(3, np.complex64)),
    "bool": (lambda: Exported(aligned(2, np.uint8), _BOOL), aligned(2, np.uint8).view(np.bool_)),
    "bfloat16": (lambda: Exported(aligned(3, np.uint16), _BFLOAT), aligned(3, np.uint16).view(ml_dtypes.bfloat16)),
    "a scalar": (lambda: Exported(aligned(1).reshape(())), aligned(1).reshape(())),
    "nothing": (lambda: Exported(aligned(4)[:0].reshape(0, 5)), np.empty((0, 5), np.float32)),
    "transposed": (lambda: Exported(MATRIX.T), MATRIX.T),
    "transposed, PyTorch": (lambda: Torch(MATRIX.T), MATRIX.T),
    "begins at an odd place": (lambda: Exported(aligned(8)[1:]), np.arange(1, 8, dtype=np.float32)),
    "begins at an odd place, PyTorch": (lambda: Torch(aligned(8)[1:]), np.arange(1, 8, dtype=np.float32)),
    "sizes of one": (lambda: Exported(MATRIX[:, :1][:1]), MATRIX[:1, :1]),
}


@pytest.mark.parametrize(("make", "expected"), list(FOUND.values()), ids=list(FOUND))
def test_arrays_stay_where_they_are(gpu: FakeGpu, make: Callable[[], Any], expected: NDArray[Any]) -> None:
    given = make()
    found = as_tensor(given, W)
    assert isinstance(found, GpuArray)
    assert (found.dtype, found.shape, found.nbytes) == (expected.dtype, expected.shape, expected.nbytes)
    np.testing.assert_array_equal(found.to_host(), expected)
    assert as_tensor(found, W) is found


def test_the_library_orders_its_work(gpu: FakeGpu) -> None:
    exported = Exported(MATRIX)
    as_tensor(exported, W)
    assert exported.streams == [STREAM]
    for stream, waits in ((None, []), (1, [1]), (0x55, [0x55])):
        gpu.waited_for.clear()
        as_tensor(Interface(MATRIX, stream=stream), W)
        assert gpu.waited_for == waits


def test_gradients_of_another_dtype_are_converted_on_the_host(gpu: FakeGpu) -> None:
    assert isinstance(as_tensor_of(np.dtype(np.float32), Exported(MATRIX), W), GpuArray)
    converted = as_tensor_of(np.dtype(np.float64), Exported(MATRIX), W)
    assert isinstance(converted, np.ndarray)
    np.testing.assert_array_equal(converted, MATRIX)


@pytest.mark.parametrize("make", [Exported, Torch])
def test_without_a_driver_the_library_copies(monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]) -> None:
    def no_driver(index: int) -> Any:
        raise GpuError("the CUDA driver cannot be loaded")

    monkeypatch.setattr(tensors, "open_gpu", no_driver)
    for read in (as_tensor, as_array):
        np.testing.assert_array_equal(read(make(MATRIX), W), MATRIX)


def test_dtypes_that_tensors_cannot_have(gpu: FakeGpu) -> None:
    for given in (Exported(aligned(2, np.uint8), 10), Interface(np.zeros(2, "V3"))):
        with pytest.raises(gradserve.InvalidArgumentError, match="expected a dtype out of .* for component 'w'"):
            as_tensor(given, W)


class TestOutputs:
    def test_arrays_that_can_be_written_to(self, gpu: FakeGpu) -> None:
        for given in (Exported(aligned(4)), Interface(aligned(4))):
            found = as_output(given, W)
            assert isinstance(found, GpuArray)
            found.fill(np.full(4, 3, np.float32))
            assert given.values.tolist() == [3, 3, 3, 3]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (Interface(aligned(4), read_only=True), "expected an array that can be written to for component 'w', got"),
            (Exported(MATRIX.T), "expected an array in C order that begins at a multiple of 64 bytes"),
            (5, "expected an array of NumPy, or one in the memory of a GPU"),
        ],
        ids=["read-only", "transposed", "a number"],
    )
    def test_others(self, gpu: FakeGpu, given: Any, message: str) -> None:
        with pytest.raises(gradserve.InvalidArgumentError, match=message):
            as_output(given, W)
