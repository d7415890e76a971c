"""The errors of CUDA, with CuPy's names and texts."""

_NAMES = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    201: ("cudaErrorDeviceUninitialized", "invalid device context"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    712: ("cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"),
    713: ("cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"),
}
INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 101, 201, 400
ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED = 700, 712, 713


class CUDARuntimeError(RuntimeError):
    """An error of the runtime API; `status` is its number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__("{}: {}".format(*_NAMES[status]))


class CUDADriverError(RuntimeError):
    """An error of the driver API; `status` is its number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__({2: "CUDA_ERROR_OUT_OF_MEMORY: out of memory"}[status])


class CUBLASError(RuntimeError):
    """An error of cuBLAS; `status` is its number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__({1: "CUBLAS_STATUS_NOT_INITIALIZED", 3: "CUBLAS_STATUS_ALLOC_FAILED"}[status])
