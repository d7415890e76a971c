"""Kernels compile, and are right, on processors with little or much more than that of this machine."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from tests.processors.compute import digest_of_norms

PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "any x86-64": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
    "x86-64-v3": {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""},
    "x86-64-v3, 16 numbers in a vector": {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""},
}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "any x86-64": (),
    "x86-64-v3": ("--small",),  # the norms are computed with more in a vector
    "x86-64-v3, 16 numbers in a vector": ("--lanes", "16"),
}

IN_EVERY_RUN = "any x86-64"
"""The processor that kernels are compiled for in every run; `make check-processors` takes minutes for all others."""
checks_all = "ALL_PROCESSORS" in os.environ
ONLY_ON_DEMAND = "takes a minute: make check-processors"

is_x86 = platform.machine() in ("x86_64", "AMD64")
has_v3 = is_x86 and all(llvm.get_host_cpu_features().get(name) for name in ("avx2", "bmi2", "f16c", "fma"))

OTHER_MACHINE = ("aarch64-unknown-linux-gnu", "generic") if is_x86 else ("x86_64-unknown-linux-gnu", "x86-64")


def run(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a module of this package. However long that takes: the machine may be busy."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.processors.{module}", *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )


@pytest.mark.usefixtures("_compiled_kernels")
@pytest.mark.skipif(not is_x86, reason="needs an x86-64")
@pytest.mark.parametrize("name", PROCESSORS)
def test_results(name: str, tmp_path: Path) -> None:
    """They are within bounds everywhere, and the same bits wherever a product is added in one step (FMA)."""
    if "v3" in name and not has_v3:
        pytest.skip("needs AVX2")
    if name != IN_EVERY_RUN and not checks_all:
        pytest.skip(ONLY_ON_DEMAND)
    environment = dict(PROCESSORS[name])
    options = OPTIONS[name]
    if "--lanes" in options:
        environment["NUMBA_CACHE_DIR"] = str(tmp_path)  # whose key does not know of that
    done = run("compute", *options, environment=environment)
    assert done.returncode == 0, done.stderr
    if "--lanes" in options:
        assert done.stdout == digest_of_norms()


@pytest.mark.skipif(not checks_all, reason=ONLY_ON_DEMAND)
@pytest.mark.parametrize(("triple", "processor"), [OTHER_MACHINE], ids=lambda value: value)
def test_a_process_has_all_that_the_kernels_need(triple: str, processor: str, tmp_path: Path) -> None:
    done = run("cross_compile", triple, processor, environment={"NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [
        "LayerNorm float16",
        "conversions float16",
        "conversions bfloat16",
        "activation functions float32",
        "sums float16",
        "packed sums float32",
        "FusedBatchNorm float16",
        "",
    ]


def test_what_a_process_lacks_is_found(tmp_path: Path) -> None:
    """As LLVM converts float16 where a processor does not, by functions of a compiler's runtime library."""
    arguments = ("x86_64-unknown-linux-gnu", "x86-64", "--float16-by-llvm")
    done = run("cross_compile", *arguments, environment={"NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert "needs __extendhfsf2, __truncsfhf2, which the process does not have" in done.stderr
