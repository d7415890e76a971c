"""Programs in PTX, as NVRTC compiles them for CuPy. Needs no GPU."""

import re
from typing import Any

from cuda.bindings import nvrtc

from gradserve_server.devices.cuda.programs import COMPILE_OPTIONS, Program
from tests.devices.cuda.test_compiles import CUPY_OPTIONS

_ACCESS = re.compile(
    r"\b(?:ld|st)(?!\.(?:shared|param|local|const))[.a-z:]*?(?:\.v(?P<count>[24]))?\.[bfsu](?P<bits>8|16|32|64)\b"
)


def ptx_of(program: Program) -> str:
    """Returns a program in PTX, for the oldest GPUs in use."""
    _, handle = nvrtc.nvrtcCreateProgram(program.source.encode(), program.name.encode(), 0, [], [])
    options = [each.encode() for each in (*COMPILE_OPTIONS, *CUPY_OPTIONS, "--gpu-architecture=compute_80")]
    try:
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
        _, size = nvrtc.nvrtcGetPTXSize(handle)
        ptx: Any = b" " * size
        nvrtc.nvrtcGetPTX(handle, ptx)
        return str(ptx.decode())
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def widest_access(ptx: str, kernel: str) -> int:
    """Returns the most bytes that one instruction of a kernel loads from global memory, or stores there."""
    body = ptx.partition(f".entry {kernel}(")[2].partition("\n}")[0]
    return max(int(found["count"] or 1) * int(found["bits"]) // 8 for found in _ACCESS.finditer(body))
