"""A kernel that cannot be made on a machine is left out; the process and the other kernels do not suffer."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import types
from numba.core import registry

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host import jit
from gradserve_server.devices.host.intrinsics import undefined_symbols
from gradserve_server.devices.host.jit import KernelError, argument_types, compile_kernel
from gradserve_server.devices.host.kernels import Declared, ForkJoin, Kernel, KernelTable, PreparedKernels
from gradserve_server.devices.host.loading import KernelCompiler
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.ops.activation import cpu_loops as loops
from gradserve_server.ops.registry import make_families
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

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


def fill(out: Any) -> None:
    out[:] = 1


@dataclass(frozen=True)
class Filling:
    fill: Kernel


def test_a_table_is_compiled_for_its_dtypes() -> None:
    table = KernelTable(
        what="it",
        package=__package__,
        kernels=Filling,
        types={dtype: {"T": dtype.name} for dtype in (FLOAT32, FLOAT64)},
        declared={"fill": Declared("test_kernel_tables.fill", "{T}[]")},
    )
    for dtype in (FLOAT32, FLOAT64):
        kernels = table.compile(dtype, lambda: False)
        assert kernels is not None
        array = np.zeros(3, dtype)
        kernels.fill(array)
        assert array.tolist() == [1, 1, 1]
        with pytest.raises(TypeError):
            kernels.fill(np.zeros(3, np.int8))


def test_every_kernel_is_declared() -> None:
    with pytest.raises(AssertionError, match="it"):
        KernelTable(what="it", package=__package__, kernels=Filling, types={}, declared={})


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("int64", types.int64),
        ("bool", types.boolean),
        ("float32[]", types.float32[::1]),
        ("const uint16[]", types.Array(types.uint16, 1, "C", readonly=True)),
        ("float64[3]", types.float64[:, :, ::1]),
    ],
)
def test_types_of_arguments(declared: str, expected: Any) -> None:
    assert argument_types(declared) == (expected,)
    assert argument_types(f"{declared}, int64") == (expected, types.int64)


class Table(KernelTable[str]):
    """Whose kernels are names."""

    def compile(
        self, dtype: np.dtype[Any], stop: Callable[[], bool], compiler: KernelCompiler | None = None
    ) -> str | None:
        if dtype == FLOAT64 and self.package == "without float64":
            raise KernelError("it needs more")
        return None if stop() else dtype.name

    def __post_init__(self) -> None:
        pass


def table(package: str = "") -> Table:
    return Table("it", package, str, {dtype: {} for dtype in (FLOAT32, FLOAT64, FLOAT16)}, {})


def test_kernels_are_prepared_one_after_the_other() -> None:
    checks = iter([False, False, True])
    prepared = PreparedKernels(table())
    prepared.prepare(lambda: next(checks))
    assert [prepared.get(dtype) for dtype in (FLOAT32, FLOAT64, FLOAT16)] == ["float32", "float64", None]


def test_the_kernels_of_one_dtype_may_be_missing(caplog: pytest.LogCaptureFixture) -> None:
    prepared = PreparedKernels(table("without float64"))
    prepared.prepare(lambda: False)
    assert [prepared.get(dtype) for dtype in (FLOAT32, FLOAT64, FLOAT16)] == ["float32", None, "float16"]
    assert caplog.messages == ["no kernels of it for float64, NumPy computes instead: it needs more"]


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("batch_norm", (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)),
        ("gru", (FLOAT32, FLOAT64, BFLOAT16, FLOAT16)),
        ("cudnn_rnn", (FLOAT32, FLOAT64, FLOAT32, FLOAT64)),
        ("activation", (FLOAT32, FLOAT64)),
        ("layer_norm", (FLOAT32, BFLOAT16, FLOAT16, FLOAT64) * 2),  # and those of long groups
        ("sums", (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)),
        ("optimizers", (FLOAT32, FLOAT64, FLOAT32, FLOAT64, FLOAT64)),  # and sums of packed updates, and exact ones
    ],
)
def test_a_family_without_kernels_says_so_and_computes_with_numpy(
    name: str,
    dtypes: tuple[np.dtype[Any], ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(
        function: Callable[..., None], argument_types: tuple[Any, ...], *, contract: bool
    ) -> Callable[..., None]:
        raise KernelError("not on this machine")

    monkeypatch.setattr(jit, "compile_kernel", refuse)
    parallel = ForkJoin(1)
    beside = {"sums": Reducer(parallel), "optimizers": Stepper(parallel)}
    family: Any = {**make_families(CpuDevice(BufferPool(0)), parallel), **beside}[name]
    with caplog.at_level(logging.INFO):
        family.prepare(lambda: False)
    assert [message.split(" for ")[1] for message in caplog.messages] == [
        f"{dtype}, NumPy computes instead: not on this machine" for dtype in dtypes
    ]
    prepared = [value for value in vars(family).values() if isinstance(value, PreparedKernels)]
    assert [kernels.get(dtype) for kernels in prepared for dtype in dtypes] == [None] * len(dtypes) * len(prepared)
    assert prepared


def test_the_cache_forgets_a_kernel_when_what_it_imports_changes() -> None:
    names = {file.name for file in jit._source_files(Path(loops.__file__))}
    # spec has only constants for it.
    assert names > {"jit.py", "intrinsics.py", "cpu_loops.py", "spec.py"}
    assert names.isdisjoint({"cpu.py", "reference.py", "pool.py", "parallel.py"})
