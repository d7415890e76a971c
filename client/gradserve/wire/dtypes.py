"""The NumPy dtypes of the element types in `gradserve.v1.DataType`."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from gradserve.v1 import tensor_pb2

DType: TypeAlias = np.dtype[Any]

BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)

_DTYPES: dict[tensor_pb2.DataType, DType] = {
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DATA_TYPE_BFLOAT16: BFLOAT16,
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT64: np.dtype("<f8"),
    tensor_pb2.DATA_TYPE_INT8: np.dtype("i1"),
    tensor_pb2.DATA_TYPE_INT16: np.dtype("<i2"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.DATA_TYPE_UINT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_UINT32: np.dtype("<u4"),
    tensor_pb2.DATA_TYPE_UINT64: np.dtype("<u8"),
    tensor_pb2.DATA_TYPE_BOOL: np.dtype("?"),
    tensor_pb2.DATA_TYPE_COMPLEX64: np.dtype("<c8"),
    tensor_pb2.DATA_TYPE_COMPLEX128: np.dtype("<c16"),
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}

KNOWN_NAMES = ", ".join(str(dtype) for dtype in _DATA_TYPES)
"""The names of the dtypes that tensors can have."""


def to_dtype(data_type: tensor_pb2.DataType) -> DType:
    """Returns the NumPy dtype of a wire type.

    Raises:
        ValueError: The type is unspecified or not known to this version.
    """
    try:
        return _DTYPES[data_type]
    except KeyError:
        raise ValueError(f"expected a known DataType, got {data_type}") from None


def to_data_type(dtype: DTypeLike) -> tensor_pb2.DataType:
    """Returns the wire type of a NumPy dtype, or of anything that names one ("bfloat16" included).

    Raises:
        TypeError: No wire type has this dtype.
    """
    if isinstance(dtype, np.dtype) and dtype in _DATA_TYPES:
        return _DATA_TYPES[dtype]
    return _DATA_TYPES[parse_dtype(dtype)]


def parse_dtype(dtype: DTypeLike) -> DType:
    """Returns the little-endian NumPy dtype that `dtype` names.

    Raises:
        TypeError: Tensors cannot have this dtype.
    """
    if dtype is None:  # which NumPy takes for float64
        raise TypeError(f"expected a dtype out of {KNOWN_NAMES}; got None")
    parsed = BFLOAT16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    parsed = parsed.newbyteorder("<")
    if parsed not in _DATA_TYPES:
        raise TypeError(f"expected a dtype out of {KNOWN_NAMES}; got {parsed}")
    return parsed


def is_real(dtype: DType) -> bool:
    """Returns True if a tensor's dtype has real numbers or bool."""
    return dtype.kind != "c"
