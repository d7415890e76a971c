"""The driver's numbers, and how its errors are told."""

import ctypes
from typing import Any

import pytest

import gradserve_protocol.gpu as driver
from gradserve_protocol.gpu import GpuError


def test_the_numbers_are_those_of_cuda() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    attribute, event, stream = bindings.CUpointer_attribute, bindings.CUevent_flags, bindings.CUstream_flags
    assert attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID == driver._BUFFER_ID
    assert attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL == driver._DEVICE_ORDINAL
    assert attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE == driver._CAN_BE_SHARED
    assert event.CU_EVENT_BLOCKING_SYNC == driver._BLOCKING_EVENT
    assert event.CU_EVENT_DISABLE_TIMING == driver._NO_TIMING
    assert event.CU_EVENT_INTERPROCESS == driver._INTERPROCESS
    assert stream.CU_STREAM_NON_BLOCKING == driver._NON_BLOCKING_STREAM
    assert bindings.CU_IPC_HANDLE_SIZE == driver.HANDLE_BYTES


class Failing:
    """A driver in which one function fails."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_NO_DEVICE"
            for each in arguments:
                if isinstance(getattr(each, "_obj", None), ctypes.c_void_p):
                    each._obj.value = 1
            return 100 if name == self._name else 0

        return call


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_gpu_that_is_not_there(name: str) -> None:
    with pytest.raises(GpuError, match=rf"{name} fails with CUDA_ERROR_NO_DEVICE \(100\)"):
        driver.Gpu(Failing(name), 0)


def test_the_context_of_the_thread_comes_back_after_an_error() -> None:
    library = Failing("cuIpcGetMemHandle")
    gpu = driver.Gpu(library, 0)
    with pytest.raises(GpuError, match="cuIpcGetMemHandle"):
        gpu.memory_handle(64)
    assert library.calls.count("cuCtxPushCurrent_v2") == library.calls.count("cuCtxPopCurrent_v2") > 0


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LIBRARY", "libnothing.so.1")
    with pytest.raises(GpuError, match="the CUDA driver cannot be loaded"):
        driver.load_library()
