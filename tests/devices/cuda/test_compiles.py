"""Every kernel compiles for the GPUs of data centres, and its registers suffice."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

from gradserve_server.devices.cuda.program import COMPILE_OPTIONS, Program
from gradserve_server.devices.cuda.reduction import kernels as sums
from gradserve_server.ops.activation.cuda import kernels as activation_kernels
from gradserve_server.ops.batch_norm.cuda import launches
from gradserve_server.ops.cudnn_rnn.cuda import tag
from gradserve_server.ops.dtypes import FLOATING
from gradserve_server.ops.gru.cuda import kernels as gru_kernels
from gradserve_server.ops.layer_norm.cuda import kernels as layer_norm_kernels

CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy adds to ours."""


def programs(dtypes: Iterable[np.dtype[Any]]) -> Iterator[Program]:
    yield tag.program()
    for dtype in dtypes:
        for operation in launches.KERNELS:
            yield launches.program(operation, dtype)
        yield gru_kernels.program(dtype)
        yield layer_norm_kernels.program(dtype)
        yield activation_kernels.program(dtype)
        yield from map(sums.program, (key for key in sums.KEYS if key.gradient == dtype))


REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
"""What ptxas says of a kernel."""


ARCHITECTURES = {"sm_80": (np.dtype(np.float32),), "sm_90": FLOATING}
"""With which dtypes: both have the same registers, so the older one shows only what it lacks."""


@pytest.mark.parametrize(
    ("program", "architecture"),
    [
        pytest.param(program, architecture, id=f"{program.name}-{architecture}")
        for architecture, dtypes in ARCHITECTURES.items()
        for program in programs(dtypes)
    ],
)
def test_kernels_compile_and_spill_nothing(program: Program, architecture: str) -> None:
    log = _compile(program, architecture)
    reports = {report["kernel"]: report for report in REPORT.finditer(log)}
    assert set(reports) == set(program.kernels)
    spilled = {kernel: report[0] for kernel, report in reports.items() if report["stores"] + report["loads"] != "00"}
    assert not spilled


def test_a_kernel_without_enough_registers_is_seen() -> None:
    program = launches.program("gradient", FLOATING[0])
    source = program.source.replace("__launch_bounds__(512, 1)", "__launch_bounds__(512, 4)")
    log = _compile(Program(program.name, source, program.kernels), "sm_90")
    assert any(report["stores"] != "0" for report in REPORT.finditer(log))


def test_kernel_names_are_unique() -> None:
    names = [name for program in programs(FLOATING) for name in program.kernels]
    assert len(names) == len(set(names))


def _compile(program: Program, architecture: str) -> str:
    """Returns what the compiler says."""
    options = [*COMPILE_OPTIONS, *CUPY_OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    result, handle = nvrtc.nvrtcCreateProgram(program.source.encode(), program.name.encode(), 0, [], [])
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
    try:
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
        log = _log(handle)
        assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return log


def _log(handle: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(handle)
    log: bytes = b" " * size
    nvrtc.nvrtcGetProgramLog(handle, log)
    return log.decode()
