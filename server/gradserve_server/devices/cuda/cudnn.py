"""The part of cuDNN 9 for recurrent networks, by ctypes.

Names are those of cuDNN's headers, so that they can be compared.
"""

import ctypes
import logging
import weakref
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_ulonglong, c_void_p
from enum import IntEnum
from typing import Any

from gradserve_server.errors import InternalError, InvalidArgumentError

_log = logging.getLogger(__name__)

_Handle = _Descriptor = _Memory = c_void_p
_NewObject, _Size, _Ints = POINTER(c_void_p), POINTER(c_size_t), POINTER(c_int)
_Enum = c_int


class Status(IntEnum):
    """The values of cudnnStatus_t that are distinguished."""

    CUDNN_STATUS_SUCCESS = 0
    CUDNN_STATUS_NOT_SUPPORTED = 3000
    CUDNN_STATUS_NOT_SUPPORTED_SHAPE = 3002
    CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE = 3003
    CUDNN_STATUS_NOT_SUPPORTED_LAYOUT = 3004
    CUDNN_STATUS_NOT_SUPPORTED_PADDING = 3011
    CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED = 4003
    CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004


class DataType(IntEnum):
    """Values of cudnnDataType_t."""

    CUDNN_DATA_FLOAT = 0
    CUDNN_DATA_DOUBLE = 1
    CUDNN_DATA_HALF = 2


class MathType(IntEnum):
    """Values of cudnnMathType_t."""

    CUDNN_DEFAULT_MATH = 0
    CUDNN_TENSOR_OP_MATH = 1
    CUDNN_FMA_MATH = 3


class RnnAlgo(IntEnum):
    """Values of cudnnRNNAlgo_t."""

    CUDNN_RNN_ALGO_STANDARD = 0


class RnnMode(IntEnum):
    """Values of cudnnRNNMode_t."""

    CUDNN_RNN_RELU = 0
    CUDNN_RNN_TANH = 1
    CUDNN_LSTM = 2
    CUDNN_GRU = 3


class RnnBiasMode(IntEnum):
    """Values of cudnnRNNBiasMode_t."""

    CUDNN_RNN_DOUBLE_BIAS = 2


class DirectionMode(IntEnum):
    """Values of cudnnDirectionMode_t."""

    CUDNN_UNIDIRECTIONAL = 0
    CUDNN_BIDIRECTIONAL = 1


class RnnInputMode(IntEnum):
    """Values of cudnnRNNInputMode_t."""

    CUDNN_LINEAR_INPUT = 0
    CUDNN_SKIP_INPUT = 1


class RnnDataLayout(IntEnum):
    """Values of cudnnRNNDataLayout_t."""

    CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED = 0
    CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED = 2


class ForwardMode(IntEnum):
    """Values of cudnnForwardMode_t."""

    CUDNN_FWD_MODE_INFERENCE = 0
    CUDNN_FWD_MODE_TRAINING = 1


class WgradMode(IntEnum):
    """Values of cudnnWgradMode_t."""

    CUDNN_WGRAD_MODE_ADD = 0


ENUMS: tuple[type[IntEnum], ...] = (
    *(Status, DataType, MathType, RnnAlgo, RnnMode, RnnBiasMode),
    *(DirectionMode, RnnInputMode, RnnDataLayout, ForwardMode, WgradMode),
)
CUDNN_RNN_PADDED_IO_ENABLED = 1
"""The flag of a network whose sequences are padded rather than packed."""

CHECKED_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "cudnnCreate": (_NewObject,),
    "cudnnDestroy": (_Handle,),
    "cudnnSetStream": (_Handle, c_void_p),
    "cudnnCreateTensorDescriptor": (_NewObject,),
    "cudnnDestroyTensorDescriptor": (_Descriptor,),
    "cudnnSetTensorNdDescriptor": (_Descriptor, _Enum, c_int, _Ints, _Ints),
    "cudnnGetTensorNdDescriptor": (_Descriptor, c_int, POINTER(_Enum), _Ints, _Ints, _Ints),
    "cudnnCreateDropoutDescriptor": (_NewObject,),
    "cudnnDestroyDropoutDescriptor": (_Descriptor,),
    "cudnnDropoutGetStatesSize": (_Handle, _Size),
    "cudnnSetDropoutDescriptor": (_Descriptor, _Handle, c_float, _Memory, c_size_t, c_ulonglong),
    "cudnnRestoreDropoutDescriptor": (_Descriptor, _Handle, c_float, _Memory, c_size_t, c_ulonglong),
    "cudnnCreateRNNDescriptor": (_NewObject,),
    "cudnnDestroyRNNDescriptor": (_Descriptor,),
    "cudnnSetRNNDescriptor_v8": (
        *(_Descriptor, _Enum, _Enum, _Enum, _Enum, _Enum, _Enum, _Enum, _Enum),
        *(c_int32, c_int32, c_int32, c_int32, _Descriptor, c_uint32),
    ),
    "cudnnCreateRNNDataDescriptor": (_NewObject,),
    "cudnnDestroyRNNDataDescriptor": (_Descriptor,),
    "cudnnSetRNNDataDescriptor": (_Descriptor, _Enum, _Enum, c_int, c_int, c_int, _Ints, _Memory),
    "cudnnGetRNNTempSpaceSizes": (_Handle, _Descriptor, _Enum, _Descriptor, _Size, _Size),
    "cudnnGetRNNWeightSpaceSize": (_Handle, _Descriptor, _Size),
    "cudnnGetRNNWeightParams": (
        *(_Handle, _Descriptor, c_int32, c_size_t, _Memory, c_int32),
        *(_Descriptor, POINTER(c_void_p), _Descriptor, POINTER(c_void_p)),
    ),
    "cudnnRNNForward": (
        *(_Handle, _Descriptor, _Enum, _Memory, _Descriptor, _Memory, _Descriptor, _Memory),
        *(_Descriptor, _Memory, _Memory, _Descriptor, _Memory, _Memory),
        *(c_size_t, _Memory, c_size_t, _Memory, c_size_t, _Memory),
    ),
    "cudnnRNNBackwardData_v8": (
        *(_Handle, _Descriptor, _Memory, _Descriptor, _Memory, _Memory, _Descriptor, _Memory),
        *(_Descriptor, _Memory, _Memory, _Memory, _Descriptor, _Memory, _Memory, _Memory),
        *(c_size_t, _Memory, c_size_t, _Memory, c_size_t, _Memory),
    ),
    "cudnnRNNBackwardWeights_v8": (
        *(_Handle, _Descriptor, _Enum, _Memory, _Descriptor, _Memory, _Descriptor, _Memory, _Descriptor, _Memory),
        *(c_size_t, _Memory, c_size_t, _Memory, c_size_t, _Memory),
    ),
}
"""The argument types of the functions that return a status."""

OTHER_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "cudnnGetVersion": (c_size_t, ()),
    "cudnnGetErrorString": (c_char_p, (_Enum,)),
    "cudnnGetLastErrorString": (None, (c_char_p, c_size_t)),
}
"""The result and argument types of all other functions."""

_UNSUPPORTED = frozenset(status for status in Status if status.name.startswith("CUDNN_STATUS_NOT_SUPPORTED"))
_OUT_OF_MEMORY = frozenset(status for status in Status if status.name.endswith("ALLOCATION_FAILED"))
_MAX_MESSAGE_BYTES = 1024
_SONAME = "libcudnn.so.9"


class Cudnn:
    """The library. Safe to use from several threads, each with handles and descriptors of its own."""

    def __init__(self, library: Any) -> None:
        """Declares the functions of a loaded library.

        Raises:
            AttributeError: A function is missing.
        """
        signatures = {name: (c_int, arguments) for name, arguments in CHECKED_FUNCTIONS.items()} | dict(OTHER_FUNCTIONS)
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self.version: int = self._functions["cudnnGetVersion"]()

    def call(self, name: str, *arguments: Any) -> None:
        """Calls one of CHECKED_FUNCTIONS.

        Raises:
            InvalidArgumentError: cuDNN does not support the arguments.
            MemoryError: There is not enough memory.
            InternalError: cuDNN failed in another way; the message has the function and the reason.
        """
        status = self._functions[name](*arguments)
        if status != Status.CUDNN_STATUS_SUCCESS:
            raise self._error(name, status)

    def destroy(self, name: str, address: c_void_p) -> None:
        """Calls a function that destroys an object; logs a failure, because no caller can handle it."""
        try:
            self.call(name, address)
        except (InternalError, InvalidArgumentError, MemoryError) as error:
            _log.warning("%s", error)

    def _error(self, name: str, status: int) -> Exception:
        details = ctypes.create_string_buffer(_MAX_MESSAGE_BYTES)
        self._functions["cudnnGetLastErrorString"](details, _MAX_MESSAGE_BYTES)
        text = self._functions["cudnnGetErrorString"](status).decode(errors="replace")
        reason = details.value.decode(errors="replace").strip()
        message = f"{name} of cuDNN {self.version} failed: {text}" + (f": {reason}" if reason else "")
        if status in _UNSUPPORTED:
            return InvalidArgumentError(message)
        return MemoryError(message) if status in _OUT_OF_MEMORY else InternalError(message)


class CudnnObject:
    """A handle or a descriptor, destroyed with the last reference to it. ctypes passes it as its address."""

    def __init__(self, cudnn: Cudnn, kind: str) -> None:
        """Creates a "TensorDescriptor", a "DropoutDescriptor", ...; "" is a handle, for the current device.

        Raises:
            InternalError: cuDNN cannot create it; for a handle, there may be no device.
            MemoryError: There is not enough memory.
        """
        self._as_parameter_ = c_void_p()
        cudnn.call(f"cudnnCreate{kind}", ctypes.byref(self._as_parameter_))
        finalizer = weakref.finalize(self, cudnn.destroy, f"cudnnDestroy{kind}", self._as_parameter_)
        finalizer.atexit = False  # CUDA may be gone at exit


def load_cudnn() -> Cudnn:
    """Loads cuDNN 9 from NVIDIA's wheels, or else from the system.

    Raises:
        InternalError: It cannot be loaded; the message has the reason.
    """
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise InternalError(f"cuDNN 9 cannot be searched for: {error}; see the extras cuda12 and cuda13") from error
    try:
        return Cudnn(ctypes.CDLL(load_nvidia_dynamic_lib("cudnn").abs_path or _SONAME))
    except (DynamicLibNotFoundError, OSError, AttributeError) as error:
        raise InternalError(f"cuDNN 9 cannot be loaded: {error}; see the extras cuda12 and cuda13") from error


def int_array(values: Any) -> Any:
    """Returns integers in an array for cuDNN.

    Raises:
        InvalidArgumentError: An integer does not fit into 32 bits.
    """
    return (c_int * len(values))(*(int32(value) for value in values))


def int32(value: int) -> int:
    """Returns a number for cuDNN as an int32, which ctypes would truncate silently.

    Raises:
        InvalidArgumentError: It does not fit.
    """
    if not -(2**31) <= value < 2**31:
        raise InvalidArgumentError(f"cuDNN takes sizes of at most 32 bits, got {value}")
    return int(value)
