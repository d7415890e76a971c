"""Kernels compile without a cache on disk, and one on disk forgets what has changed."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def test_kernels_compile_where_there_is_no_place_for_a_cache() -> None:
    import numba

    from gradserve_server.devices.host.jit import compile_kernel

    scope: dict[str, Any] = {}
    exec("def fill(array, value):\n    array[:] = value / 0\n", scope)  # noqa: S102
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(scope["fill"])
    kernel = compile_kernel(scope["fill"], (numba.float32[::1], numba.float32))
    array = np.zeros(3, np.float32)
    kernel(array, np.float32(1))
    assert np.isinf(array).all()
    with pytest.raises(TypeError, match="No matching definition"):
        kernel(np.zeros(3, np.int8), np.float32(1))


def test_servers_of_one_process_share_its_kernels() -> None:
    import numba

    from gradserve_server.devices.host.jit import compile_kernel
    from gradserve_server.devices.host.sharing import attend

    board = (numba.int64[:, ::1], numba.int64, numba.int64, numba.int64)
    kernel = compile_kernel(attend, board)
    assert compile_kernel(attend, board) is kernel
    assert compile_kernel(attend, board, contract=False) is not kernel


def test_the_cache_forgets_a_kernel_when_what_it_calls_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    from gradserve_server.devices.host.jit import compile_kernel

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kernel_file, called_file = tmp_path / "cached_kernel.py", tmp_path / "called_by_kernel.py"
    kernel_file.write_text("from called_by_kernel import value\n\ndef fill(array):\n    array[:] = value()\n")
    stamp = kernel_file.stat().st_mtime_ns

    def result(returned: int) -> float:
        called_file.write_text(
            f"from numba.extending import register_jitable\n\n@register_jitable\ndef value():\n    return {returned}\n"
        )
        for name in ("cached_kernel", "called_by_kernel"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        array = np.zeros(2)
        compile_kernel(importlib.import_module("cached_kernel").fill, (numba.float64[::1],))(array)
        return float(array[0])

    assert result(1) == 1
    assert list(tmp_path.rglob("*.nbi"))
    assert result(2) == 2
    assert kernel_file.stat().st_mtime_ns == stamp
