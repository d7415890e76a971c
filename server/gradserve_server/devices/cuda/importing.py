"""Imports CuPy, and makes its settings for the whole process: its cache of kernels, and its products of matrices."""

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_log = logging.getLogger(__name__)

_VARIABLE = "CUPY_CACHE_DIR"
_DEFAULT = "~/.cupy/kernel_cache"


class _KernelFiles(Protocol):
    """CuPy's own cache (`cupy.cuda._compiler_cache.DiskKernelCacheBackend`)."""

    def load(self, name: str) -> bytes | None: ...

    def save(self, name: str, cubin: bytes, source: str) -> None: ...


class KernelCache:
    """CuPy's cache of compiled kernels on disk, which disk errors switch off.

    CuPy's own cache raises them, and so fails ops whose kernels have compiled.
    """

    def __init__(self, files: _KernelFiles | None) -> None:
        """Takes CuPy's own cache; None to keep nothing."""
        self._files = files

    def load(self, name: str) -> bytes | None:
        """Returns the kernel saved under a name, None if there is none or it cannot be read."""
        if self._files is None:
            return None
        try:
            return self._files.load(name)
        except OSError as error:
            self._give_up(error)
            return None

    def save(self, name: str, cubin: bytes, source: str) -> None:
        """Saves a compiled kernel, if possible."""
        if self._files is None:
            return
        try:
            self._files.save(name, cubin, source)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._files = None
        _log.warning("compiled CUDA kernels cannot be cached: %s; the next start compiles them again", error)


def import_cupy() -> Any:
    """Returns CuPy, which caches its compiled kernels if it can, and multiplies matrices of float32 in float32.

    By default cuBLAS may round factors to fewer bits, and does so if the environment has CUPY_TF32=1.

    Call it before anything else imports CuPy, which otherwise fails if it cannot make the folder of its cache.

    Raises:
        ImportError: It is not installed, or its libraries cannot be loaded.
    """
    known: Any = sys.modules.get("cupy")
    if known is not None and isinstance(known.cuda.compiler._kernel_cache_backend, KernelCache):
        return known
    given = os.environ.get(_VARIABLE)
    problem = _problem_with(Path(given if given is not None else _DEFAULT).expanduser())
    if problem is not None:
        _log.warning(
            "compiled CUDA kernels cannot be cached: %s; each start compiles them again (%s names another folder)",
            problem,
            _VARIABLE,
        )
        os.environ[_VARIABLE] = os.sep  # a folder that exists; nothing is written there
    try:
        import cupy
    finally:
        if problem is not None:
            if given is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = given
    compiler = cupy.cuda.compiler
    compiler._set_kernel_cache_backend(KernelCache(None if problem else compiler._kernel_cache_backend))
    cupy._core.set_compute_type(np.float32, cupy._core._routines_linalg.COMPUTE_TYPE_PEDANTIC)
    return cupy


def _problem_with(folder: Path) -> OSError | None:
    """Creates a folder if it does not exist; returns why no files can be made in it, None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error
