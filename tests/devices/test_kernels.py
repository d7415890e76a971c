"""A kernel that cannot be made on a machine is left out; the process and the other kernels do not suffer."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import types
from numba.core import registry

from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host import jit
from gradserve_server.devices.host.jit import compile_kernel
from gradserve_server.devices.host.kernels import KernelError, prepare_each
from gradserve_server.devices.host.object_file import undefined_symbols
from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.devices.host.pool import BufferPool
from gradserve_server.ops.activation.cpu import compile as activation_compile
from gradserve_server.ops.activation.cpu import loops
from gradserve_server.ops.batch_norm.cpu import compile as batch_norm_compile
from gradserve_server.ops.cudnn_rnn.cpu import compile as cudnn_rnn_compile
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from gradserve_server.ops.gru.cpu import compile as gru_compile
from gradserve_server.ops.registry import make_families

no_such_function = types.ExternalFunction("gradserve_no_such_function", types.int32())


def calls_what_is_not_there(array: Any) -> None:
    no_such_function()


def is_not_for_numba(array: Any) -> Iterator[None]:
    with array:
        yield


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (calls_what_is_not_there, "needs gradserve_no_such_function, which the process does not have"),
        (is_not_for_numba, "is_not_for_numba does not compile"),
    ],
)
def test_a_kernel_that_cannot_be_made_is_an_error(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        compile_kernel(function, (types.float32[::1],))


def test_symbols_that_an_object_file_does_not_define() -> None:
    module = llvm.parse_assembly("""
        declare void @elsewhere()
        define void @here() { call void @elsewhere() ret void }
        define void @there() { call void @here() ret void }
    """)
    machine = registry.cpu_target.target_context.codegen()._tm
    assert undefined_symbols(machine.emit_object(module)) == {"elsewhere"}


def test_what_is_no_object_file() -> None:
    with pytest.raises(ValueError, match="ELF"):
        undefined_symbols(b"MZ")


def test_kernels_are_prepared_one_after_the_other() -> None:
    checks = iter([False, False, True])
    prepared = prepare_each(
        "it", (FLOAT32, FLOAT64, FLOAT16), lambda dtype, stop: None if stop() else dtype.name, lambda: next(checks)
    )
    assert list(prepared) == [(FLOAT32, "float32"), (FLOAT64, "float64")]


def test_the_kernels_of_one_dtype_may_be_missing(caplog: pytest.LogCaptureFixture) -> None:
    def compile_kernels(dtype: np.dtype[Any], stop: Callable[[], bool]) -> str:
        if dtype == FLOAT64:
            raise KernelError("it needs more")
        return dtype.name

    prepared = prepare_each("it", (FLOAT32, FLOAT64, FLOAT16), compile_kernels, lambda: False)
    assert list(prepared) == [(FLOAT32, "float32"), (FLOAT16, "float16")]
    assert caplog.messages == ["no kernels of it for float64, NumPy computes instead: it needs more"]


@pytest.mark.parametrize(
    ("name", "module", "dtypes"),
    [
        ("batch_norm", batch_norm_compile, (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)),
        ("gru", gru_compile, (FLOAT32, FLOAT64, BFLOAT16, FLOAT16)),
        ("cudnn_rnn", cudnn_rnn_compile, (FLOAT32, FLOAT64)),
        ("activation", activation_compile, (FLOAT32, FLOAT64)),
    ],
)
def test_a_family_without_kernels_says_so_and_computes_with_numpy(
    name: str,
    module: Any,
    dtypes: tuple[np.dtype[Any], ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(function: Callable[..., None], argument_types: tuple[Any, ...]) -> Callable[..., None]:
        raise KernelError("not on this machine")

    monkeypatch.setattr(module, "compile_kernel", refuse)
    family: Any = make_families(CpuDevice(BufferPool(0)), ForkJoin(1))[name]
    before = {key: dict(value) for key, value in vars(family).items() if isinstance(value, dict)}
    with caplog.at_level(logging.INFO):
        family.prepare(lambda: False)
    assert [message.split(" for ")[1] for message in caplog.messages] == [
        f"{dtype}, NumPy computes instead: not on this machine" for dtype in dtypes
    ]
    assert {key: vars(family)[key] for key in before} == before


def test_the_cache_forgets_a_kernel_when_what_it_imports_changes() -> None:
    names = {file.name for file in jit._source_files(loops.forward_float32)}
    # kernels and spec have only constants for it.
    assert names > {"jit.py", "intrinsics.py", "half_precision.py", "loops.py", "kernels.py", "spec.py"}
    assert names.isdisjoint({"family.py", "reference.py", "pool.py", "rows.py"})
