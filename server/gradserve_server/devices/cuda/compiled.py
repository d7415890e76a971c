"""Programs compiled for one GPU."""

import threading
from typing import Any

from numpy.typing import NDArray

from gradserve_server.devices.cancellation import checkpoint
from gradserve_server.devices.cuda.program import COMPILE_OPTIONS, Launch, Limits, Program


class CudaProgram:
    """A program on one GPU: a `CompiledProgram`."""

    def __init__(self, cupy: Any, program: Program, limits: Limits) -> None:
        self._cupy = cupy
        self._program = program
        self._limits = limits
        self._compiling = threading.Lock()
        self._kernels: dict[str, Any] = {}

    def compile(self) -> None:
        """Compiles all kernels, or loads them from CuPy's cache, unless that is done.

        Raises:
            cupy.cuda.compiler.CompileException: They do not compile.
        """
        with self._compiling:
            if self._kernels:
                return
            module = self._cupy.RawModule(code=self._program.source, options=COMPILE_OPTIONS, backend="nvrtc")
            kernels = {name: module.get_function(name) for name in self._program.kernels}
            for kernel in kernels.values():
                kernel.max_dynamic_shared_size_bytes = self._limits.shared_bytes
            self._kernels = kernels

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        """Starts a kernel on CuPy's current stream. CuPy passes an array of one element by value."""
        checkpoint()
        self._kernels[launch.kernel](launch.grid, (launch.threads,), (arguments,), shared_mem=launch.shared_bytes)
