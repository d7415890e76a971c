"""A process that compiles kernels for another machine, and checks that all they need is in a process like this one.

python -m tests.processors.cross_compile TRIPLE PROCESSOR [--all] [--float16-by-llvm]
"""

import argparse
import sys
from typing import Any

import llvmlite.binding as llvm
from numba.core import registry
from numba.core.codegen import JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys
from numba.core.runtime.nrtdynmod import compile_nrt_functions

from gradserve_server.devices.host import intrinsics
from tests.processors.subset import prepare


class NoEngine:
    """In place of what links code into the process: code for another machine stays where it is."""

    def finalize_object(self) -> None:
        pass

    def is_symbol_defined(self, name: str) -> bool:
        return False

    def _load_defined_symbols(self, module: Any) -> None:
        pass


class CrossCodegen(JITCPUCodegen):
    """Numba's way to make code, for another machine."""

    def __init__(self, triple: str, processor: str) -> None:
        self._triple = triple
        self._processor = processor
        super().__init__("cross")  # type: ignore[no-untyped-call]

    def _init(self, llvm_module: Any) -> None:
        target = llvm.Target.from_triple(self._triple)
        self._tm_features = ""
        self._tm = target.create_target_machine(cpu=self._processor, opt=3, jit=True)
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._engine: Any = NoEngine()
        self._loopvect, self._opt_level = False, 0

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)  # type: ignore[no-untyped-call]
        module.triple = self._triple
        return module

    def _get_host_cpu_name(self) -> str:
        return self._processor

    def _add_module(self, module: Any) -> None:
        pass

    def _scan_and_fix_unresolved_refs(self, module: Any) -> None:
        pass

    def set_env(self, env_name: str, env: Any) -> None:
        pass


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("triple")
    arguments.add_argument("processor")
    arguments.add_argument("--all", action="store_true")
    arguments.add_argument("--float16-by-llvm", action="store_true", help="leave the conversions of float16 to LLVM")
    given = arguments.parse_args()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    context = registry.cpu_target.target_context
    rtsys.initialize(context)  # for this process
    context._internal_codegen = CrossCodegen(given.triple, given.processor)
    with global_compiler_lock:
        rtsys._library = compile_nrt_functions(context)  # type: ignore[no-untyped-call]  # for the kernels
    if given.float16_by_llvm:
        intrinsics.converts_float16 = lambda context: True
    for name in prepare(everything=given.all):
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
