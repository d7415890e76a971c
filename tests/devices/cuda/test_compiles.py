"""Every kernel compiles for the GPUs that there are, and its registers suffice."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

from gradserve_server.devices.cuda import reduction as sums
from gradserve_server.devices.cuda.programs import COMPILE_OPTIONS, Program
from gradserve_server.ops.activation import cuda as activation_kernels
from gradserve_server.ops.batch_norm import cuda as launches
from gradserve_server.ops.cudnn_rnn.cuda.family import tag_program
from gradserve_server.ops.gru import cuda as gru_kernels
from gradserve_server.ops.layer_norm import cuda as layer_norm_kernels
from gradserve_server.ops.registry import cuda_programs
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FLOATING

CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy adds to ours."""


def programs(dtypes: Iterable[np.dtype[Any]]) -> Iterator[Program]:
    for dtype in dtypes:
        for operation in launches.KERNELS:
            yield launches.program(operation, dtype)
        yield gru_kernels.program(dtype)
        yield layer_norm_kernels.program(dtype)
        yield from map(sums.program, (key for key in sums.KEYS if key.gradient == dtype))


REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
"""What ptxas says of a kernel."""


ARCHITECTURES: dict[str, list[np.dtype[Any]]] = {
    "sm_80": [FLOAT16],
    "sm_90": [FLOAT32, FLOAT64],
    "sm_100": [BFLOAT16],
    "sm_120": [FLOAT32],
}
"""With which dtypes: all have the same registers, so one dtype shows what an architecture lacks."""
ACTIVATIONS = {"sm_90": [FLOAT64], "sm_100": [BFLOAT16], "sm_120": [FLOAT32]}
"""There are many of these, but with few registers."""
SPILLED_BYTES = {"sm_90": 12, "sm_100": 8, "sm_120": 64}
"""The most that a kernel stores or loads. ptxas stops at 40 or 48 registers, where 128 are allowed, and keeps a few
words in memory: for Hopper around a division of doubles, for Blackwell elsewhere, too."""


def cases() -> Iterator[tuple[Program, str]]:
    for architecture, dtypes in ARCHITECTURES.items():
        activations = map(activation_kernels.program, ACTIVATIONS.get(architecture, ()))
        for program in (tag_program(), *activations, *programs(dtypes)):
            yield program, architecture


@pytest.mark.parametrize(
    ("program", "architecture"),
    [pytest.param(*case, id=f"{case[0].name}-{case[1]}") for case in cases()],
)
def test_kernels_compile_and_spill_nothing(program: Program, architecture: str) -> None:
    log = _compile(program, architecture)
    reports = {report["kernel"]: report for report in REPORT.finditer(log)}
    assert set(reports) == set(program.kernels)
    most = SPILLED_BYTES.get(architecture, 0)
    spilled = {
        name: report[0] for name, report in reports.items() if max(map(int, report.group("stores", "loads"))) > most
    }
    assert not spilled


def test_a_kernel_without_enough_registers_is_seen() -> None:
    program = launches.program("gradient", FLOATING[0])
    source = program.source.replace("__launch_bounds__(512, 1)", "__launch_bounds__(512, 4)")
    log = _compile(Program(program.name, source, program.kernels), "sm_90")
    assert any(report["stores"] != "0" for report in REPORT.finditer(log))


def test_kernel_names_are_unique() -> None:
    activations = map(activation_kernels.program, FLOATING)
    everything = (tag_program(), *activations, *programs(FLOATING))
    names = [name for program in everything for name in program.kernels]
    assert len(names) == len(set(names))
    assert set(everything) == set(cuda_programs())


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
