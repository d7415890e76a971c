"""Kernels are loaded when calls ask for them; what the cache lacks is compiled by a process of low priority."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import pytest

from gradserve_server.devices.host import jit
from gradserve_server.devices.host.kernels import Declared, Kernel, KernelTable, PreparedKernels
from gradserve_server.devices.host.loading import _NICENESS, KernelCompiler, KernelLoader
from gradserve_server.tensors.spec import FLOAT32, FLOAT64
from tests.devices.compiled_elsewhere import DEED, NOTE
from tests.servers.polling import eventually

FILL = {
    "module": "tests.devices.compiled_elsewhere",
    "function": "fill",
    "arguments": "float32[]",
    "contract": True,
    "is_shared": False,
}


@dataclass(frozen=True)
class Filling:
    fill: Kernel


def table(function: str = "fill") -> KernelTable[Filling]:
    return KernelTable(
        what="filling",
        package=__package__,
        kernels=Filling,
        types={dtype: {"T": dtype.name} for dtype in (FLOAT32, FLOAT64)},
        declared={"fill": Declared(f"compiled_elsewhere.{function}", "{T}[]")},
    )


@pytest.fixture
def loader() -> Iterator[KernelLoader]:
    made = KernelLoader()
    yield made
    made.close()
    made.join()


def loaded(loader: KernelLoader) -> Filling | None:
    """Returns the kernels that a call has asked for, once all that can be loaded is."""
    prepared = PreparedKernels(table(), loader=loader)
    prepared.get(FLOAT32)
    loader.begin()
    loader.join()
    return prepared.get(FLOAT32)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiling process has the priority of the tests, which wait for it."""
    monkeypatch.setattr("gradserve_server.devices.host.loading._NICENESS", 0)


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the compiling process says that it is there; its cache is empty, and so is this process's."""
    cache = str(tmp_path / "cache")
    monkeypatch.setenv("NUMBA_CACHE_DIR", cache)
    monkeypatch.setattr(numba.config, "CACHE_DIR", cache)
    note = tmp_path / "note"
    monkeypatch.setenv(NOTE, str(note))
    jit.compile_kernel.cache_clear()
    return note


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that this process itself compiles, rather than loads."""
    names: list[str] = []
    finalize = jit._Library._finalize_final_module

    def record(library: jit._Library) -> None:
        names.append(library.name)
        finalize(library)

    monkeypatch.setattr(jit._Library, "_finalize_final_module", record)
    return names


# --- What is loaded


def test_nothing_is_loaded_that_no_call_asks_for(loader: KernelLoader) -> None:
    prepared = PreparedKernels(table(), loader=loader)
    loader.begin()
    assert loader.is_idle
    assert prepared.get(np.dtype(np.int8)) is None
    assert loader.is_idle


def test_a_call_that_misses_kernels_has_those_for_its_dtype_loaded(loader: KernelLoader) -> None:
    prepared = PreparedKernels(table(), loader=loader)
    loader.begin()
    assert prepared.get(FLOAT64) is None
    loader.join()
    assert set(prepared._ready) == {FLOAT64}
    assert loader.is_idle
    filled = prepared.get(FLOAT64)
    assert filled is not None
    array = np.zeros(3)
    filled.fill(array)
    assert array.tolist() == [7, 7, 7]


def test_what_is_asked_for_before_the_loader_begins_waits_for_that(loader: KernelLoader) -> None:
    prepared = PreparedKernels(table(), loader=loader)
    for _ in range(2):
        assert prepared.get(FLOAT32) is None
    assert (loader.has_begun, loader.is_idle) == (False, False)
    loader.begin()
    loader.join()
    assert prepared.get(FLOAT32) is not None


def test_kernels_that_cannot_be_made_are_asked_for_once(loader: KernelLoader, caplog: pytest.LogCaptureFixture) -> None:
    prepared = PreparedKernels(table("cannot_be_compiled"), loader=loader)
    loader.begin()
    for _ in range(3):
        assert prepared.get(FLOAT32) is None
        loader.join()
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith("no kernels of filling for float32, NumPy computes instead: cannot_be_compiled does not")


def test_a_request_that_fails_is_logged_and_the_next_one_is_carried_out(
    loader: KernelLoader, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def fail(_stop: Callable[[], bool]) -> None:
        raise OSError("no compiler")

    loader.want("failing", fail)
    loader.want("next", lambda _stop: done.append("next"))
    loader.begin()
    loader.join()
    assert done == ["next"]
    assert "preparing the kernels of failing failed" in caplog.text
    assert "no compiler" in caplog.text


def test_the_log_says_how_far_a_long_preparation_is(
    loader: KernelLoader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradserve_server.devices.host.loading._SILENT_SECONDS", 0.0)
    loader.want("slow", lambda _stop: None)
    loader.want("next", lambda _stop: None)
    with caplog.at_level("INFO", "gradserve_server.devices.host.loading"):
        loader.begin()
        loader.join()
    said = [each.getMessage() for each in caplog.records]
    assert any(each.startswith("preparing kernels: 1 of 2 groups are done") and ", next next" in each for each in said)
    assert said[-1].startswith("kernels prepared in ")


def test_a_closed_loader_begins_nothing(loader: KernelLoader) -> None:
    loader.close()
    loader.want("it", lambda _stop: pytest.fail("it is closed"))
    loader.begin()
    loader.join()


# --- The process that compiles


def test_what_the_cache_lacks_is_compiled_by_a_process_of_low_priority(
    loader: KernelLoader, note: Path, compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradserve_server.devices.host.loading._NICENESS", _NICENESS)
    prepared = PreparedKernels(table(), loader=loader)
    loader.begin()
    for dtype in (FLOAT32, FLOAT64):
        prepared.get(dtype)
    loader.join()
    assert compiled_here == []
    assert all(prepared.get(dtype) is not None for dtype in (FLOAT32, FLOAT64))
    own, process = note.read_text().split()[:2]
    assert int(own) == os.nice(0) + _NICENESS
    assert not Path(f"/proc/{process}").exists(), "it ends when all is compiled"


def test_what_the_cache_has_needs_no_process(loader: KernelLoader, note: Path) -> None:
    table().compile(FLOAT32, lambda: False)
    jit.compile_kernel.cache_clear()
    prepared = PreparedKernels(table(), loader=loader)
    prepared.prepare(lambda: FLOAT32 in prepared._ready)
    assert prepared.get(FLOAT32) is not None
    assert not note.exists()


def test_without_a_cache_this_process_compiles(
    loader: KernelLoader, note: Path, compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nowhere:
        def __init__(self, function: object) -> None:
            raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(jit, "_Cache", Nowhere)
    assert loaded(loader) is not None
    assert compiled_here
    assert not note.exists()


def test_where_no_process_can_be_started_this_one_compiles(
    loader: KernelLoader, note: Path, compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert loaded(loader) is not None
    assert compiled_here
    assert not note.exists()


def test_a_compiler_that_crashes_costs_the_kernels_and_not_the_server(
    loader: KernelLoader, note: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DEED, "crash")
    assert loaded(loader) is None
    assert "fill does not compile: the process that compiles it has ended with status -6" in caplog.text


def test_closing_does_not_wait_for_a_kernel_that_is_being_compiled(
    loader: KernelLoader, note: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DEED, "block")
    prepared = PreparedKernels(table(), loader=loader)
    prepared.get(FLOAT32)
    loader.begin()
    eventually(lambda: note.exists() and note.read_text().endswith("\n"))
    loader.close()
    loader.join()
    assert "NumPy computes instead" not in caplog.text
    assert not Path(f"/proc/{note.read_text().split()[1]}").exists()


def test_closing_leaves_no_kernel_to_this_process_while_the_other_one_starts(
    loader: KernelLoader, note: Path, compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    never_ready = tmp_path / "python"
    never_ready.write_text(f"#!/bin/sh\necho > {note}\nread line\n")
    never_ready.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(never_ready))
    prepared = PreparedKernels(table(), loader=loader)
    prepared.get(FLOAT32)
    loader.begin()
    eventually(note.exists)
    loader.close()
    loader.join()
    assert prepared.get(FLOAT32) is None
    assert compiled_here == []


def test_closing_ends_the_process_while_more_kernels_are_wanted(loader: KernelLoader, note: Path) -> None:
    def load(_stop: Callable[[], bool]) -> None:
        loader.compiler.compile(FILL)
        loader.close()

    loader.want("it", load)
    loader.want("next", lambda _stop: pytest.fail("it is closed"))
    loader.begin()
    loader.join()
    assert not Path(f"/proc/{note.read_text().split()[1]}").exists()


def test_a_process_that_ended_after_a_kernel_costs_the_next_one(note: Path) -> None:
    compiler = KernelCompiler()
    assert compiler.compile(FILL)
    assert compiler._process is not None
    compiler._process.kill()
    compiler._process.wait()
    with pytest.raises(EOFError, match="has ended with status -9"):
        compiler.compile({**FILL, "arguments": "float64[]"})
    assert compiler.compile({**FILL, "arguments": "float64[]"}), "by another process"
    compiler.rest()


def test_a_closed_compiler_starts_no_process(note: Path) -> None:
    compiler = KernelCompiler()
    compiler.close()
    with pytest.raises(EOFError, match="is closed"):
        compiler.compile(FILL)
    assert not note.exists()
