"""The command: the checks of this machine, the table of all checks, each after those it stands on, and the report.

Each check yields what it finds; those that need one that has found a problem are skipped.
"""

import contextlib
import importlib.metadata
import platform
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gradserve_server.commands.doctor.connection import (
    check_address,
    check_connection,
    check_health,
    check_settings,
    check_tls,
)
from gradserve_server.commands.doctor.server import (
    check_access,
    check_clock,
    check_disk,
    check_memory,
    check_speed,
    check_training,
    check_transport,
    check_versions,
)
from gradserve_server.commands.doctor.subject import Finding, Observation, Subject, Verdict, ok, warning
from gradserve_server.commands.servers import server_options, servers_at
from gradserve_server.commands.wording import ExitCode, echo_json, json_option, tell, tell_marked
from gradserve_server.config.settings import SettingsError
from gradserve_server.runtime.process import num_cores, silence_grpc

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
    from gradserve_server.devices.cuda.programs import INSTALLED
    from gradserve_server.devices.host.jit import cache_folder

    folder = cache_folder()
    if folder is None:
        cure = "export NUMBA_CACHE_DIR=FOLDER, with one that can be written"
        yield warning("each server compiles the kernels that its calls need anew: nowhere can they be kept", cure)
    else:
        number = len(list(folder.glob("*.nbc")))
        state = f"{number} kernels" if number else "no kernels, so a server compiles those that its first calls need"
        yield ok(f"compiled for the CPU: {state}, in {folder}")
    if Path("/dev/nvidiactl").exists() and not INSTALLED.is_dir():
        yield warning(
            "kernels for the GPU are compiled at each server's start", "gradserve kernels compile --architectures LIST"
        )


@dataclass(frozen=True)
class _Check:
    """A check of a server.

    Attributes:
        name: Its name.
        run: Yields what it finds.
        needs: The check without a problem in which it makes no sense.
    """

    name: str
    run: Callable[[Subject], Iterator[Observation]]
    needs: str = ""


_SETTINGS = "settings"
_CHECKS = (
    _Check(_SETTINGS, check_settings),
    _Check("address", check_address, _SETTINGS),
    _Check("connection", check_connection, "address"),
    _Check("tls", check_tls, "connection"),
    _Check("health", check_health, "tls"),
    _Check("access", check_access, "health"),
    _Check("versions", check_versions, "access"),
    _Check("transport", check_transport, "access"),
    _Check("speed", check_speed, "access"),
    _Check("clock", check_clock, "access"),
    _Check("memory", check_memory, "access"),
    _Check("disk", check_disk, "access"),
    _Check("training", check_training, "access"),
)
_OF_THIS_MACHINE = {"libraries": check_libraries, "machine": check_machine}
_OF_THIS_INSTALLATION = {"extras": check_extras, "kernels": check_kernels}


def _findings(name: str, observations: Iterator[Observation], server: str = "") -> Iterator[Finding]:
    """Yields what a check finds; an error is a problem, too."""
    import gradserve

    try:
        for verdict, found, cure in observations:
            yield Finding(name, verdict, found, cure, server)
    except gradserve.GradserveError as error:
        yield Finding(name, Verdict.PROBLEM, str(error), f"gradserve explain {error.code}", server)
    except Exception as error:
        text = f"the check has failed: {type(error).__name__}: {error}"
        yield Finding(name, Verdict.PROBLEM, text, "report it as a fault of gradserve doctor", server)


def _of_server(subject: Subject) -> Iterator[Finding]:
    reasons: dict[str, str] = {}
    for check in _CHECKS:
        if reason := reasons.get(check.needs):
            reasons[check.name] = reason
            yield Finding(check.name, Verdict.SKIPPED, f"not possible: {reason} has a problem", server=subject.address)
            continue
        for finding in _findings(check.name, check.run(subject), subject.address):
            if finding.verdict is Verdict.PROBLEM:
                reasons[check.name] = check.name
            yield finding


def examine(
    address: str, timeout: float, container: str = "", *, with_installation: bool = False, **tls: Any
) -> Iterator[Finding]:
    """Examines this machine and the servers at an address; yields findings as they come. Blocks.

    Args:
        address: What `gradserve.connect` takes as one text.
        timeout: Seconds that each call waits.
        container: The container in which to train; empty for the default one.
        with_installation: Whether to look at extras and kernels of this machine, too.
        **tls: The TLS options.
    """
    for name, run in (_OF_THIS_MACHINE | (_OF_THIS_INSTALLATION if with_installation else {})).items():
        yield from _findings(name, run())
    try:
        servers = servers_at(address, timeout)
    except click.ClickException as error:  # as SettingsError is
        if isinstance(error, SettingsError):
            name, cure = _SETTINGS, "correct ADDRESS or GRADSERVE_ADDRESS: HOST:PORT or unix:PATH"
        else:
            name, cure = "address", "gradserve cluster status shows a cluster on Ray; otherwise correct DNS"
        yield Finding(name, Verdict.PROBLEM, error.message, cure, address)
        return
    for index, server in enumerate(servers):
        with contextlib.ExitStack() as stack:
            yield from _of_server(Subject(server, timeout, container, tls, index, len(servers), stack))


_LOOKS = {
    Verdict.OK: ("+", "green"),
    Verdict.WARNING: ("!", "yellow"),
    Verdict.PROBLEM: ("x", "red"),
    Verdict.SKIPPED: ("-", "bright_black"),
}
"""The mark and the colour of each verdict."""


def show(finding: Finding) -> None:
    """Prints a finding on one line, and its cure on another."""
    mark, colour = _LOOKS[finding.verdict]
    tell_marked(f"{mark} {finding.verdict:8}", colour, f"{finding.name:11} {' '.join(finding.found.split())}")
    if finding.cure:
        tell(f"{'':22} cure: {finding.cure}")


@click.command()
@click.option("--container", metavar="NAME", default="", help="where the client trains  [default: default]")
@json_option
@server_options
def doctor(address: str, timeout: float, container: str, as_json: bool, **tls: Any) -> None:
    """Look for what keeps a client here from training with the server at ADDRESS, and name the cures.

    Prints a line for each check: the verdict (ok, warning, problem, or skipped after another problem), what was found,
    and the cure. Stores 4 MiB on the server for a moment, to measure how fast they arrive. Without ADDRESS, looks at
    what is installed on this machine, too.
    """
    silence_grpc()
    context = click.get_current_context()
    is_given = ParameterSource.COMMANDLINE in map(context.get_parameter_source, ("address", "given_address"))
    found, shown = [], ""
    for finding in examine(address, timeout, container, with_installation=not is_given, **tls):
        found.append(finding)
        if not as_json:
            if finding.server not in ("", address, shown):  # one of several
                tell(f"server at {finding.server}:")
            shown = finding.server
            show(finding)
    problems = [each for each in found if each.verdict is Verdict.PROBLEM]
    if as_json:
        checks = [{**vars(each), "verdict": str(each.verdict)} for each in found]
        echo_json({"address": address, "num_problems": len(problems), "checks": checks})
    code = ExitCode.USAGE if any(each.name == _SETTINGS for each in problems) else ExitCode.FAILED
    context.exit(code if problems else ExitCode.DONE)
