"""The real cuDNN, as far as it goes without a GPU."""

import ctypes
import os
import subprocess
import sys
from ctypes import byref, c_int, c_void_p
from pathlib import Path
from typing import Any

import pytest

from gradserve_server.devices.cuda.cudnn import (
    CUDNN_RNN_PADDED_IO_ENABLED,
    Cudnn,
    CudnnObject,
    DataType,
    MathType,
    RnnDataLayout,
    RnnMode,
    Status,
    int_array,
)
from gradserve_server.errors import InternalError, InvalidArgumentError
from tests.devices.cuda.cudnn.ask_layouts import problems

pytestmark = pytest.mark.cudnn

ROOT = Path(__file__).parents[4]
SUPPORTED = {
    (DataType.CUDNN_DATA_FLOAT, DataType.CUDNN_DATA_FLOAT, MathType.CUDNN_FMA_MATH),
    (DataType.CUDNN_DATA_HALF, DataType.CUDNN_DATA_FLOAT, MathType.CUDNN_TENSOR_OP_MATH),
    (DataType.CUDNN_DATA_DOUBLE, DataType.CUDNN_DATA_DOUBLE, MathType.CUDNN_DEFAULT_MATH),
}


@pytest.fixture(scope="module")
def cudnn(library: Path) -> Cudnn:
    return Cudnn(ctypes.CDLL(str(library)))


def set_rnn(cudnn: Cudnn, types: tuple[int, int, int], mode: int, input_size: int, projection: int) -> None:
    rnn, dropout = CudnnObject(cudnn, "RNNDescriptor"), CudnnObject(cudnn, "DropoutDescriptor")
    sizes = (input_size, 4, projection, 2)
    arguments: tuple[Any, ...] = (rnn, 0, mode, 2, 1, 0, *types, *sizes, dropout, CUDNN_RNN_PADDED_IO_ENABLED)
    cudnn.call("cudnnSetRNNDescriptor_v8", *arguments)


@pytest.mark.parametrize("status", Status, ids=lambda status: status.name)
def test_status_has_its_name(cudnn: Cudnn, status: Status) -> None:
    assert cudnn._functions["cudnnGetErrorString"](status) == status.name.encode()


@pytest.mark.parametrize("types", sorted(SUPPORTED))
@pytest.mark.parametrize("mode", RnnMode, ids=lambda mode: mode.name)
def test_network_is_taken(cudnn: Cudnn, types: tuple[int, int, int], mode: RnnMode) -> None:
    set_rnn(cudnn, types, mode, 3, 4)


@pytest.mark.parametrize(
    ("projection", "error", "status"),
    [(0, InternalError, "BAD_PARAM"), (5, InvalidArgumentError, "NOT_SUPPORTED")],
    ids=["none", "more than the units"],
)
def test_projection_that_is_refused(cudnn: Cudnn, projection: int, error: type[Exception], status: str) -> None:
    """Why a network without one is described with the number of its units."""
    with pytest.raises(error, match=f"cudnnSetRNNDescriptor_v8 of cuDNN 9.* failed: CUDNN_STATUS_{status}"):
        set_rnn(cudnn, min(SUPPORTED), RnnMode.CUDNN_LSTM, 3, projection)


def test_the_reason_of_a_failure_is_told(cudnn: Cudnn) -> None:
    with pytest.raises(InternalError, match="CUDNN_STATUS_BAD_PARAM: .*inputSize < 1"):
        set_rnn(cudnn, min(SUPPORTED), RnnMode.CUDNN_LSTM, -1, 4)


@pytest.mark.parametrize("layout", RnnDataLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize(("lengths", "is_taken"), [([2, 4, 1], True), ([5, 4, 1], False)], ids=str)
def test_sequences(cudnn: Cudnn, layout: RnnDataLayout, lengths: list[int], is_taken: bool) -> None:
    """Longer ones than the longest are refused. (Empty ones are not, and fail later.)"""
    data, fill = CudnnObject(cudnn, "RNNDataDescriptor"), c_void_p()
    arguments = (data, DataType.CUDNN_DATA_FLOAT, layout, 4, 3, 5, int_array(lengths), byref(fill))
    if is_taken:
        cudnn.call("cudnnSetRNNDataDescriptor", *arguments)
    else:
        with pytest.raises(InternalError, match="BAD_PARAM"):
            cudnn.call("cudnnSetRNNDataDescriptor", *arguments)


def test_states(cudnn: Cudnn) -> None:
    states, data_type, count = CudnnObject(cudnn, "TensorDescriptor"), c_int(), c_int()
    shape, strides = (c_int * 4)(), (c_int * 4)()
    cudnn.call("cudnnSetTensorNdDescriptor", states, 0, 3, int_array((4, 3, 6)), int_array((18, 6, 1)))
    cudnn.call("cudnnGetTensorNdDescriptor", states, 4, byref(data_type), byref(count), shape, strides)
    assert (data_type.value, shape[: count.value], strides[: count.value]) == (0, [4, 3, 6], [18, 6, 1])


def test_the_parameter_vector_is_a_weight_space(library: Path) -> None:
    """For every kind of network and dtype: there is no padding, biases come last, skip_input leaves out matrices."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.cuda.cudnn.ask_layouts", str(library)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(problems())
    assert [line for line in lines if not line.endswith(": is the vector")] == []
