"""Tensors with the protocols of PyTorch and of others, which need not be installed for the tests."""

import ctypes
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

CPU, CUDA = (1, 0), (2, 0)
_BFLOAT, _FLOAT8_E4M3FN = 4, 10
_TYPE_CODE_OFFSET = 20


class dtype:  # noqa: N801 - named as PyTorch's
    """A dtype that has no name but its text."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


@dataclass(frozen=True)
class DType:
    """A dtype with a name, as TensorFlow's."""

    name: str


class ScalarType(type):
    """A dtype that NumPy takes, as those of JAX."""

    @property
    def dtype(cls) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype


class jax_bfloat16(metaclass=ScalarType):  # noqa: N801 - named as JAX's
    pass


class Exporting:
    """An array that has DLPack and nothing else."""

    def __init__(self, values: ArrayLike, type_code: int | None = None) -> None:
        self._values = np.array(values)
        self._type_code = type_code

    def __dlpack__(self) -> Any:
        capsule: Any = self._values.__dlpack__()
        if self._type_code is not None:
            set_type_code(capsule, self._type_code)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


class Tensor:
    """Refuses what PyTorch's refuses: NumPy while it requires a gradient, and dtypes that NumPy has not."""

    def __init__(self, values: ArrayLike, name: str = "float32", *, requires_grad: bool = False) -> None:
        self.requires_grad = requires_grad
        self.dtype = dtype(name)
        self.num_detached = 0
        self._values = np.asarray(values, ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name))

    def detach(self) -> "Tensor":
        self.num_detached += 1
        return Tensor(self._values, self._values.dtype.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self._values.dtype.kind == "V":
            raise TypeError(f"Got unsupported ScalarType {self._values.dtype}")
        return self._values

    def __dlpack__(self) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient")
        if self._values.dtype == ml_dtypes.bfloat16:
            return Exporting(self._values.view(np.uint16), _BFLOAT).__dlpack__()
        return self._values.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


class OnGpu:
    """A tensor of a GPU, of a library that does not copy to the host by itself."""

    device = "cuda:0"
    dtype = dtype("float32")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    def __dlpack__(self, **_: Any) -> NoReturn:
        raise BufferError("not to another device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA


class CopyingFromGpu(OnGpu):
    """A tensor of a GPU, of a library that copies to the host when it is asked to."""

    def __init__(self, values: ArrayLike) -> None:
        self._values = np.array(values)

    def __dlpack__(self, *, dl_device: tuple[int, int] | None = None, **_: Any) -> Any:
        assert dl_device == CPU
        return self._values.__dlpack__()


def set_type_code(capsule: Any, code: int) -> None:
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    address = get_pointer(capsule, b"dltensor")
    ctypes.c_uint8.from_address(address + _TYPE_CODE_OFFSET).value = code


def float8() -> Exporting:
    """A tensor of a dtype that NumPy does not know, which shows only in its description."""
    return Exporting(np.zeros(2, np.uint8), _FLOAT8_E4M3FN)
