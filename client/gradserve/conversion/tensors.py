"""Converts arguments to tensors that calls send: NumPy arrays, or arrays that stay on their GPU, in the dtype needed.

Arrays on a GPU are those of CuPy, PyTorch, JAX, and any other library with one of two protocols: DLPack
(https://dmlc.github.io/dlpack), and the CUDA Array Interface, version 3. Both say which stream has to wait for which.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradserve.conversion.arrays import as_array, as_dtype, detached, has_dtype, tensor_in
from gradserve.results import IndexedSlices
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import BFLOAT16, KNOWN_DTYPES, Array, DoesNotFitError, DType, converted, is_real
from gradserve_protocol.frames import ALIGNMENT
from gradserve_protocol.gpu import Gpu, GpuArray, GpuError, open_gpu

_CUDA = 2
"""The type of the device in DLPack: memory of a GPU that the CPU cannot read."""
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_BFLOAT = 4
_ON_HOST = (np.ndarray, np.generic, list, tuple, bool, int, float, complex)


def as_tensor(value: object, argument: Argument) -> Array | GpuArray:
    """Converts a value like `as_array`, but keeps an array on its GPU.

    An array that is not in C order, or is misaligned, is copied on the GPU by its own library.

    Raises:
        InvalidArgumentError: See `as_array`.
    """
    if isinstance(value, GpuArray):
        return value
    found = None if isinstance(value, _ON_HOST) else _on_gpu(value, argument, may_copy=True)
    return as_array(value, argument) if found is None else found


def as_tensor_of(dtype: DType, value: object, argument: Argument) -> Array | GpuArray:
    """Converts a value like `as_array_of`, but keeps an array of this dtype on its GPU.

    Raises:
        InvalidArgumentError: See `as_array_of`.
    """
    if type(value) is np.ndarray:
        return as_array_of(dtype, value, argument)
    tensor = as_tensor(value, argument) if has_dtype(value) else value
    if isinstance(tensor, GpuArray):
        return tensor if tensor.dtype == dtype else as_array_of(dtype, tensor.to_host(), argument)
    return as_array_of(dtype, tensor, argument)


def as_tensor_or_numbers(value: object, default_dtype: DType, argument: Argument) -> Array | GpuArray:
    """Converts a value like `as_array_or_numbers`, but keeps an array on its GPU.

    Raises:
        InvalidArgumentError: See `as_array_or_numbers`.
    """
    if type(value) is np.ndarray and value.dtype in KNOWN_DTYPES and value.flags.c_contiguous:
        return value
    return as_tensor(value, argument) if has_dtype(value) else as_array_of(default_dtype, value, argument)


def as_array_of(dtype: DType, value: object, argument: Argument) -> Array:
    """Returns a value that `as_array` takes as an array of a given dtype.

    Raises:
        InvalidArgumentError: See `as_array`; or it is complex; or a finite value would become infinite, or an integer
            another integer.
    """
    if type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous:
        return value
    array = as_array(value, argument)
    if not is_real(array.dtype):
        raise argument.error_saying("real numbers", f"an array of {array.dtype}")
    try:
        return converted(array, dtype)
    except DoesNotFitError as error:
        raise argument.error_saying(f"values of {dtype}", str(error)) from None


def as_array_or_numbers(value: object, default_dtype: DType, argument: Argument) -> Array:
    """Returns an array in its own dtype, and numbers, which have none, in a default one.

    Raises:
        InvalidArgumentError: See `as_array`, and for numbers `as_array_of`.
    """
    return as_array(value, argument) if has_dtype(value) else as_array_of(default_dtype, value, argument)


def as_output(value: object, argument: Argument) -> Array | GpuArray:
    """Returns the array to write a result to: a NumPy array, or one on a GPU.

    Raises:
        InvalidArgumentError: It is neither, read-only, or not in C order.
    """
    if isinstance(value, np.ndarray):
        if not (value.flags.writeable and value.flags.c_contiguous):
            raise argument.error_saying("an array in C order that can be written to", "another one")
        return value
    if _is_read_only(value):
        raise argument.error_saying("an array that can be written to", f"{type(value).__qualname__}, which cannot")
    found = _on_gpu(value, argument, may_copy=False)
    if found is None:
        raise argument.error("an array of NumPy, or one in the memory of a GPU whose driver is there", value)
    return found


def as_slices(value: Any) -> IndexedSlices | None:
    """Returns rows with unchecked contents; None if the value is something else.

    Takes IndexedSlices, also TensorFlow's, and sparse tensors of PyTorch whose first dimension alone is sparse, such as
    the gradient of an embedding with sparse=True. Their equal indices are added up.
    """
    if isinstance(value, IndexedSlices):
        return value
    if getattr(value, "is_sparse", False) is True and value.sparse_dim() == 1:
        rows = value.detach().coalesce()
        return IndexedSlices(rows.values(), rows.indices()[0], tuple(rows.shape))
    if type(value).__name__ == "IndexedSlices":
        return IndexedSlices(value.values, value.indices, value.dense_shape)
    return None


class _Memory(NamedTuple):
    """The memory of an array, as a protocol describes it.

    Attributes:
        dtype: A dtype of NumPy, or its name.
        strides: The distances of neighbouring elements, in bytes; None in C order.
        owner: The object that keeps the memory alive.
    """

    address: int
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    owner: object


def _on_gpu(value: Any, argument: Argument, *, may_copy: bool) -> GpuArray | None:
    """Returns an array in the memory of a GPU; None if it is elsewhere, or the CUDA driver cannot be loaded."""
    try:
        index = _index_of(value)
        if index is None:
            return None
        gpu = open_gpu(index)
        value = detached(value)
        memory = _described(value, gpu)
        dtype = as_dtype(memory.dtype, argument)
        if not _is_usable(memory):
            if not may_copy:
                raise argument.error_saying(
                    f"an array in C order that begins at a multiple of {ALIGNMENT} bytes", "another one"
                )
            memory = _described(_compact(value), gpu)
            if not _is_usable(memory):
                return None
        return GpuArray(gpu, memory.address, dtype, memory.shape, memory.owner)
    except GpuError:
        return None
    except (BufferError, RuntimeError, TypeError) as error:  # libraries raise these for what they do not export
        if may_copy:
            return None
        raise argument.error_saying("an array that can be written to", f"one that is not shared: {error}") from None


def _index_of(value: Any) -> int | None:
    """Returns the index of the GPU in whose memory an array is; None if it is elsewhere."""
    if hasattr(value, "__dlpack_device__"):
        kind, index = value.__dlpack_device__()
        return int(index) if int(kind) == _CUDA else None
    interface = getattr(value, "__cuda_array_interface__", None)
    if not isinstance(interface, dict) or interface.get("mask") is not None:
        return None
    address: int = interface["data"][0]
    return open_gpu(0).index_of(address) if address else None


def _described(value: Any, gpu: Gpu) -> _Memory:
    """Returns what there is to know of an array; what its library does to it precedes what follows in GPU's stream."""
    if hasattr(value, "__dlpack__"):
        return _in_capsule(value.__dlpack__(stream=gpu.stream))
    interface = value.__cuda_array_interface__
    if (stream := interface.get("stream")) is not None:
        gpu.wait_for_stream(stream)
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    return _Memory(
        interface["data"][0], np.dtype(interface["typestr"]), shape, None if strides is None else tuple(strides), value
    )


def _in_capsule(capsule: Any) -> _Memory:
    tensor = tensor_in(capsule)
    if tensor.type_code == _BFLOAT:
        dtype: Any = BFLOAT16
    elif tensor.type_lanes == 1 and tensor.type_code in _KINDS:
        dtype = np.dtype(f"{_KINDS[tensor.type_code]}{tensor.type_bits // 8}")
    else:
        dtype = f"type {tensor.type_code} of {tensor.type_bits} bits in DLPack"
    shape = tuple(tensor.shape[: tensor.num_dimensions])
    strides = None
    if tensor.strides and isinstance(dtype, np.dtype):
        strides = tuple(each * dtype.itemsize for each in tensor.strides[: tensor.num_dimensions])
    return _Memory((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, capsule)


def _is_usable(memory: _Memory) -> bool:
    """Returns True if elements are in C order, and begin where a segment of a payload can begin."""
    return memory.address % ALIGNMENT == 0 and (
        memory.strides is None or _are_in_order(memory.shape, memory.strides, np.dtype(memory.dtype).itemsize)
    )


def _are_in_order(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    if 0 in shape:
        return True
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _compact(value: Any) -> Any:
    """Copies an array on its GPU to separate memory, in C order, through its own library."""
    if hasattr(value, "contiguous"):  # PyTorch
        contiguous = value.contiguous()
        return contiguous.clone() if contiguous.data_ptr() == value.data_ptr() else contiguous
    return value.copy() if hasattr(value, "copy") else value


def _is_read_only(value: Any) -> bool:
    """Returns True if an array declares itself read-only, as JAX's do."""
    interface = getattr(value, "__cuda_array_interface__", None)
    return isinstance(interface, dict) and bool(interface["data"][1])
