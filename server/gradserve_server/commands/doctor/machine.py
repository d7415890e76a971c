"""Checks of this machine and of what is installed on it."""

import importlib.metadata
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from gradserve_server.commands.doctor.subject import Observation, ok, warning
from gradserve_server.runtime.process import num_cores

_LEAST_DESCRIPTORS = 1024


def check_machine() -> Iterator[Observation]:
    """Looks at the limits of this process, and at the threads that it starts."""
    import threadpoolctl

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_DESCRIPTORS:
        allowed = "unlimited" if hard == resource.RLIM_INFINITY else hard
        yield warning(
            f"a process may open {soft} files; connections and shared memory take one each",
            f"ulimit -n {_LEAST_DESCRIPTORS} (the hard limit is {allowed})",
        )
    import numpy as np  # its BLAS is what threadpoolctl sees

    cores = num_cores()
    threads = max((each["num_threads"] for each in threadpoolctl.threadpool_info()), default=1)
    if threads > cores:
        yield warning(f"BLAS has {threads} threads, and {cores} can run at once", f"export OMP_NUM_THREADS={cores}")
    else:
        yield ok(f"{cores} cores, {threads} threads of BLAS, {soft} open files allowed, NumPy {np.__version__}")


def check_libraries() -> Iterator[Observation]:
    """Names the versions of what the client stands on."""
    import gradserve

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "grpcio", "protobuf")]
    yield ok(f"gradserve {gradserve.__version__}, Python {platform.python_version()}, {', '.join(versions)}")


_EXTRAS = ("server", "dns", "tracing", "torch", "jax", "ray", "cuda12", "cuda13")


def check_extras() -> Iterator[Observation]:
    """Names the extras that are installed."""
    from gradserve_protocol.extras import MissingExtraError, install_command, require

    installed, missing = [], []
    for extra in _EXTRAS:
        try:
            require(extra)
        except MissingExtraError:
            missing.append(extra)
        else:
            installed.append(extra)
    has_gpu = Path("/dev/nvidiactl").exists()
    if has_gpu and {"cuda12", "cuda13"} <= set(missing):
        yield warning("there is a GPU, and servers here cannot use it", install_command("cuda12"))
    how = f"; {install_command('EXTRA')} installs one" if missing else ""
    yield ok(f"installed: {', '.join(installed)}; not installed: {', '.join(missing) or 'none'}{how}")


def check_kernels() -> Iterator[Observation]:
    """Looks for compiled kernels."""
    from numba.core.caching import FunctionCache

    from gradserve_server.devices.cuda.programs import INSTALLED
    from gradserve_server.devices.host.kernels import flat

    try:
        folder = Path(FunctionCache(flat).cache_path)  # type: ignore[no-untyped-call]
    except RuntimeError:
        cure = "export NUMBA_CACHE_DIR=FOLDER, with one that can be written"
        yield warning("kernels for the CPU are compiled at each start of a server: nowhere can they be kept", cure)
    else:
        number = len(list(folder.glob("*.nbc")))
        state = f"{number} kernels" if number else "no kernels, so the first server to start compiles them"
        yield ok(f"compiled for the CPU: {state}, in {folder}")
    if Path("/dev/nvidiactl").exists() and not INSTALLED.is_dir():
        yield warning(
            "kernels for the GPU are compiled at each server's start", "gradserve kernels compile --architectures LIST"
        )
