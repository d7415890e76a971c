"""The cache of compiled kernels."""

import os
from pathlib import Path
from typing import Any


class CompileException(Exception):  # noqa: N818
    """A program does not compile."""


class DiskKernelCacheBackend:
    """Compiled kernels in a folder, which must be possible to make."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)

    def load(self, name: str) -> bytes | None:
        path = self._folder / name
        return path.read_bytes() if path.exists() else None

    def save(self, name: str, cubin: bytes, source: str) -> None:
        (self._folder / name).write_bytes(cubin)


_kernel_cache_backend: Any = DiskKernelCacheBackend()


def _set_kernel_cache_backend(backend: Any) -> None:
    global _kernel_cache_backend
    _kernel_cache_backend = backend
