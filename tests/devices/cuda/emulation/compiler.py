"""Compiles programs of CUDA C++ for the CPU."""

import ctypes
import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gradserve_server.devices.cuda.programs import Program, element_sources
from gradserve_server.devices.cuda.reduction import exact_source

HERE = Path(__file__).parent
_COMMAND = (
    *(sys.executable, "-m", "ziglang", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing"),
    *("-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fsanitize-trap=all"),
    # No fortified longjmp, which takes a change of stacks for an error; no C++ library, which zig would first build.
    *("-U_FORTIFY_SOURCE", "-fno-exceptions", "-fno-rtti", "-nostdlib++", "-Wno-unknown-attributes"),
)


def compile_for_cpu(program: Program, folder: Path, options: Sequence[str] = ()) -> ctypes.CDLL:
    """Compiles a program, with further options, once for all processes that share the folder."""
    source = _source(program)
    name = hashlib.sha256("\0".join((source, *options)).encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            path = folder / f"{name}.cpp"
            path.write_text(source, encoding="utf-8")
            unfinished = library.with_suffix(".part")
            subprocess.run([*_COMMAND, *options, f"-I{HERE}", "-o", str(unfinished), str(path)], check=True)
            unfinished.rename(library)
    return ctypes.CDLL(str(library))


def _source(program: Program) -> str:
    """The program with the files that have PTX replaced, and a function for each kernel that launches it."""
    half = element_sources()[0]
    assert half in program.source
    body = program.source.replace(half, '#include "half.h"\n').replace(exact_source(), '#include "exact.h"\n')
    assert "asm(" not in body
    return "\n".join([body, *(f"EMULATED_KERNEL({kernel})" for kernel in program.kernels), ""])
