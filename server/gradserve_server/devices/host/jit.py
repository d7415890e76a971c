"""Compiles kernels with Numba, and caches them on disk. Importing this imports Numba, which takes half a second."""

import dis
import functools
import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core import compiler, compiler_machinery, errors, registry, typed_passes
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary

from gradserve_server.devices.host import sharing
from gradserve_server.devices.host.intrinsics import undefined_symbols

_BOARD_AND_JOB = (types.Array(types.int64, 2, "C"), types.int64)
"""The types of the first arguments of shared kernels."""


class KernelError(Exception):
    """A kernel cannot be compiled on this machine."""


@functools.cache  # as is `compile_kernel`
def compile_shared_kernel(
    function: Callable[..., None], argument_types: tuple[Any, ...], *, contract: bool = True
) -> Callable[..., None]:
    """Compiles a function that helpers share; see `sharing.shared` and `compile_kernel`.

    The result takes a board and a job first.

    Raises:
        KernelError: See `compile_kernel`.
    """
    return _compile(sharing.shared(function), function, (*_BOARD_AND_JOB, *argument_types), contract)


@functools.cache
def compile_kernel(
    function: Callable[..., None], argument_types: tuple[Any, ...], *, contract: bool = True
) -> Callable[..., None]:
    """Compiles a function for one signature, or loads it from Numba's cache on disk, once in a process.

    The result releases the GIL, divides by zero without an exception, and takes no other types.

    Args:
        function: A function in the part of Python that Numba compiles. Functions that it calls must be in files of the
            same folder or of this one: the cache notices changes of the files there that it imports.
        argument_types: Numba's types. Declare arrays that are only read as read-only: then it takes both kinds.
        contract: Whether a product and a sum may be computed with one rounding, on processors that can.

    Raises:
        KernelError: It does not compile for this machine's processor, or needs symbols that the process does not have.
    """
    return _compile(function, function, argument_types, contract)


def _compile(
    compiled_function: Callable[..., None],
    function: Callable[..., None],
    argument_types: tuple[Any, ...],
    contract: bool,
) -> Callable[..., None]:
    """Compiles a function that is, or is made from, `function`, in whose cache the result is kept."""
    signature = numba.void(*argument_types)
    kernel = _dispatcher(compiled_function, contract)
    try:
        try:
            kernel._cache = _Cache(function)  # type: ignore[no-untyped-call]
            kernel.compile(signature)
        except (RuntimeError, OSError):
            # There is no folder for the cache, as in a read-only container, or no space.
            kernel = _dispatcher(compiled_function, contract)
            kernel.compile(signature)
    except (errors.NumbaError, RuntimeError) as error:
        raise KernelError(f"{function.__name__} does not compile: {error}") from error
    kernel.disable_compile()
    compiled: Callable[..., None] = kernel
    return compiled


def compile_declared(module: str, function: str, arguments: str, *, contract: bool, is_shared: bool) -> None:
    """Compiles a kernel into Numba's cache on disk, for other processes to load.

    Args:
        module: The module of the function.
        function: Its name.
        arguments: The declared types of its arguments; see `kernels.Declared`.
        contract: See `compile_kernel`.
        is_shared: Whether helpers share the kernel; see `compile_shared_kernel`.

    Raises:
        KernelError: See `compile_kernel`.
    """
    compiled = compile_shared_kernel if is_shared else compile_kernel
    compiled(getattr(importlib.import_module(module), function), argument_types(arguments), contract=contract)


def misses_cache(function: Callable[..., None], argument_types: tuple[Any, ...], *, is_shared: bool) -> bool:
    """Returns True if a kernel is not in the cache on disk, and could be."""
    if is_shared:
        argument_types = (*_BOARD_AND_JOB, *argument_types)
    try:
        cache = _Cache(function)  # type: ignore[no-untyped-call]
        return not cache.has(numba.void(*argument_types))
    except (RuntimeError, OSError):
        return False


def cache_folder() -> Path | None:
    """Returns the folder on disk that keeps kernels of this package; None if none can be written."""
    try:
        return Path(_Cache(argument_types).cache_path)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def argument_types(declared: str) -> tuple[Any, ...]:
    """Returns Numba's types for declared arguments; see `kernels.Declared`."""
    return tuple(_argument_type(argument) for argument in declared.split(", "))


def _argument_type(argument: str) -> Any:
    name, bracket, axes = argument.removeprefix("const ").removesuffix("]").partition("[")
    element = types.boolean if name == "bool" else getattr(types, name)  # Numba 0.61 has the one name only
    if not bracket:
        return element
    return types.Array(element, int(axes or 1), "C", readonly=argument.startswith("const "))


def _dispatcher(function: Callable[..., None], contract: bool) -> Any:
    fastmath = {"contract"} if contract else False
    return numba.njit(nogil=True, error_model="numpy", fastmath=fastmath, pipeline_class=_Compiler)(function)


class _Library(JITCodeLibrary):
    """Checks all symbols before LLVM links the code, because LLVM ends the process if one is missing."""

    def _finalize_final_module(self) -> None:
        content = self._codegen._tm.emit_object(self._final_module)
        missing = sorted(name for name in undefined_symbols(content) if not self._is_known(name))
        if missing:
            raise KernelError(f"{self.name} needs {', '.join(missing)}, which the process does not have")
        # LLVM uses this object instead of making it again; Numba's cache stores it, too.
        self._set_compiled_object(content)  # type: ignore[no-untyped-call]
        super()._finalize_final_module()  # type: ignore[no-untyped-call]
        self._compiled_object = content

    def _is_known(self, name: str) -> bool:
        engine: Any = self._codegen._engine
        return llvm.address_of_symbol(name) is not None or bool(engine.is_symbol_defined(name))


@compiler_machinery.register_pass(mutates_CFG=False, analysis_only=True)  # type: ignore[no-untyped-call]
class _MakeLibrary(compiler_machinery.AnalysisPass):
    _name = "gradserve_make_library"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run_pass(self, state: Any) -> bool:
        library: Any = _Library
        state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return False


class _Compiler(compiler.CompilerBase):
    """Numba's compiler, with a library of our own."""

    def define_pipelines(self) -> list[Any]:
        manager = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)  # type: ignore[no-untyped-call]
        manager.add_pass_after(_MakeLibrary, typed_passes.IRLegalization)
        manager.finalize()
        return [manager]


_PACKAGE = Path(__file__).parents[2]


class _Cache(FunctionCache):
    """Numba's cache, which by itself only notices changes of the file that has the function."""

    def has(self, signature: Any) -> bool:
        """Returns whether there is code for a signature, for this processor."""
        key = self._index_key(signature, registry.cpu_target.target_context.codegen())
        return key in self._cache_file._load_index()  # type: ignore[no-untyped-call]

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        digest = hashlib.sha256()
        for file in _source_files(Path(self._py_func.__code__.co_filename)):
            digest.update(file.read_bytes())
        key: tuple[Any, ...] = super()._index_key(signature, codegen)  # type: ignore[no-untyped-call]
        return (*key, digest.hexdigest())


@functools.cache
def _source_files(first: Path) -> list[Path]:
    """Returns this file, a file of kernels, and the files that it imports from its folder and the server's packages.

    Cached, as is `_imports`: all kernels ask for the same files, and parsing takes long.
    """
    found, waiting = {Path(__file__)}, [first, Path(sharing.__file__)]
    while waiting:
        file = waiting.pop()
        if file.exists() and file not in found:
            found.add(file)
            imported = (getattr(sys.modules.get(name), "__file__", None) for name in _imports(file.read_bytes()))
            files = [Path(each) for each in imported if each is not None]  # those built into Python have none
            waiting += [each for each in files if each.parent == first.parent or _PACKAGE in each.parents]
    return sorted(found)


@functools.cache
def _imports(source: bytes) -> tuple[str, ...]:
    """Returns the names that may be modules.

    From compiled code: in Python 3.11, two threads that make syntax trees at the same time can fail.
    """
    names: list[str] = []
    waiting = [compile(source, "kernels", "exec", dont_inherit=True)]
    while waiting:
        code, module = waiting.pop(), ""
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                module = instruction.argval
                names.append(module)
            elif instruction.opname == "IMPORT_FROM":
                names.append(f"{module}.{instruction.argval}")
    return tuple(names)
