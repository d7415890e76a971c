"""Programs compiled for one GPU."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numpy.typing import NDArray

from gradserve_server.devices.cancellation import checkpoint
from gradserve_server.devices.cuda.counts import Counts
from gradserve_server.devices.cuda.precompiled import Cubins
from gradserve_server.devices.cuda.program import COMPILE_OPTIONS, Launch, Limits, Program


class CudaProgram:
    """A program on one GPU: a `CompiledProgram`.

    Each kernel is compiled by itself, when it is first needed, by one thread. Others that need the same wait for it;
    others that need another do not.
    """

    def __init__(
        self,
        cupy: Any,
        program: Program,
        limits: Limits,
        current: Callable[[], AbstractContextManager[None]],
        counts: Callable[[], Counts],
        cubins: Cubins | None = None,
    ) -> None:
        """Takes its parts.

        Args:
            cupy: CuPy.
            program: The program.
            limits: The limits of the GPU.
            current: Makes the GPU current.
            counts: Returns the counts of the calling thread.
            cubins: Kernels that are compiled.
        """
        self._cupy = cupy
        self._counts = counts
        self._program = program
        self._limits = limits
        self._current = current
        self._cubins = cubins
        self._compiling = {name: threading.Lock() for name in program.kernels}
        self._kernels: dict[str, Any] = {}

    def prepare(self, kernel: str) -> None:
        """Compiles a kernel, or loads it if that was done before, unless it is ready.

        Raises:
            cupy.cuda.compiler.CompileException: It does not compile.
        """
        with self._compiling[kernel]:
            if kernel in self._kernels:
                return
            source = self._program.source_of(kernel)
            cubin = None if self._cubins is None else self._cubins.find(source)
            with self._current():
                if cubin is not None:
                    module = self._cupy.RawModule(path=cubin)
                else:
                    module = self._cupy.RawModule(code=source, options=COMPILE_OPTIONS, backend="nvrtc")
                function = module.get_function(kernel)
                function.max_dynamic_shared_size_bytes = self._limits.shared_bytes
            self._counts().num_compiled += 1
            self._kernels[kernel] = function

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        """Starts a kernel on CuPy's current stream. CuPy passes an array of one element by value.

        Raises:
            cupy.cuda.compiler.CompileException: It does not compile.
        """
        checkpoint()
        if launch.kernel not in self._kernels:
            self.prepare(launch.kernel)
        self._counts().num_launches += 1
        self._kernels[launch.kernel](launch.grid, (launch.threads,), (arguments,), shared_mem=launch.shared_bytes)
