"""`gradserve kernels`: compiles kernels when the server is installed, so that calls find them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gradserve_server.commands.wording import steps, tell


@click.group()
def kernels() -> None:
    """Compile kernels in advance."""


@kernels.command("compile")
@click.option(
    "--architectures",
    metavar="LIST",
    help="kinds of GPU, with commas: sm_80 is an A100, sm_90 an H100, sm_100 a B200 (default: the CPU of this machine)",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="with --architectures: the folder (default: the one into which servers of this installation look)",
)
def compile_command(architectures: str | None, output: Path | None) -> None:
    """Compile all kernels, for this machine's CPU or for some kinds of GPU.

    Those of the CPU take a minute or two, and are kept in the cache of this user's servers. Otherwise a server compiles
    each when a call needs it for the first time. Those of a GPU take a minute for each kind; there need not be one.
    """
    if architectures is None:
        if output is not None:
            raise click.UsageError("--output needs --architectures: the folder of the CPU's kernels is NUMBA_CACHE_DIR")
        _compile_for_cpu()
    else:
        _compile_for_gpus(architectures, output)


def _compile_for_cpu() -> None:
    """Compiles the kernels of all host families into the cache.

    Raises:
        click.ClickException: Nothing can be kept.
    """
    from gradserve_protocol.memory.pool import BufferPool
    from gradserve_server.devices.device import CpuDevice
    from gradserve_server.devices.host.jit import cache_folder
    from gradserve_server.devices.host.kernels import ForkJoin
    from gradserve_server.devices.host.reduction import Reducer
    from gradserve_server.ops.operation import Family
    from gradserve_server.ops.registry import make_families
    from gradserve_server.parameters.optimizers.stepping import Stepper

    if cache_folder() is None:
        raise click.ClickException("kernels can be kept nowhere; name a folder that can be written in NUMBA_CACHE_DIR")
    started, parallel = time.perf_counter(), ForkJoin(1)
    families: list[Family] = [Reducer(parallel), Stepper(parallel)]
    families += make_families(CpuDevice(BufferPool(0)), parallel).values()
    with steps("CPU", len(families)) as next_step:
        for family in families:
            family.prepare(lambda: False)
            next_step()
    tell(f"CPU: {len(families)} groups of kernels, {time.perf_counter() - started:.0f} s")


def _compile_for_gpus(architectures: str, output: Path | None) -> None:
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise click.ClickException(f"CuPy cannot be imported: {error}; see the extras cuda12 and cuda13") from None
    from gradserve_server.devices.cuda.programs import INSTALLED, Cubins

    folder = output or INSTALLED
    known = [f"sm_{each}" for each in nvrtc.getSupportedArchs()]
    wanted = list(dict.fromkeys(each.strip() for each in architectures.split(",")))
    for each in wanted:
        if each not in known:
            raise click.BadParameter(
                f"{each!r} is not one of those that this NVRTC knows: {', '.join(known)}",
                param_hint="'--architectures'",
            )
    for architecture in wanted:
        cubins = Cubins(folder, architecture, nvrtc.getVersion())
        started = time.perf_counter()
        try:
            sources = list(_sources())
            with steps(architecture, len(sources)) as next_step:
                for source in sources:
                    if cubins.find(source) is None:
                        cubins.save(source, compile_source(nvrtc, source, architecture))
                    next_step()
        except OSError as error:
            raise click.ClickException(str(error)) from None
        tell(f"{architecture}: {len(sources)} kernels in {folder}, {time.perf_counter() - started:.0f} s")


def _sources() -> Iterator[str]:
    from gradserve_server.ops.registry import cuda_programs

    for program in cuda_programs():
        for kernel in program.kernels:
            yield program.source_of(kernel)


def compile_source(nvrtc: Any, source: str, architecture: str) -> bytes:
    """Returns a source compiled for an architecture by CuPy's `nvrtc`.

    Raises:
        click.ClickException: It does not compile.
    """
    from gradserve_server.devices.cuda.programs import NVRTC_OPTIONS

    with _program(nvrtc, source) as program:
        try:
            nvrtc.compileProgram(program, (*NVRTC_OPTIONS, f"--gpu-architecture={architecture}"))
        except nvrtc.NVRTCError as error:
            raise click.ClickException(f"{error}\n{nvrtc.getProgramLog(program)}") from None
        cubin: bytes = nvrtc.getCUBIN(program)
        return cubin


@contextmanager
def _program(nvrtc: Any, source: str) -> Iterator[Any]:
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        yield program
    finally:
        nvrtc.destroyProgram(program)
