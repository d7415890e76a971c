"""A Ray of this machine alone, for clusters that have no other.

Does not import Ray, which reads RAY_AUTH_MODE when it is imported.
"""

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from gradserve_ray.directory import ClusterError, LocalRay

LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""About the least that Ray takes: clusters put nothing there."""

_HEAD_PROCESS = "gcs_server"
_STARTED = "Ray runtime started"
_LOOK_SECONDS = 0.1
_STOP_SECONDS = 10.0
"""Seconds for its processes to end in order: Ray would wait for actors that others have left there."""
_LOG_TAIL = 2000
_OWN_FILES = 0o077
"""The umask under which the token is made: anyone who reads it can run code as this user."""


def runs_here() -> bool:
    """True if a Ray runs on this machine, regardless of who started it."""
    return any(each.info["name"] == _HEAD_PROCESS for each in psutil.process_iter(["name"]))


def start_local_ray(num_cpus: float, timeout: float) -> tuple[str, LocalRay]:
    """Starts a Ray on this machine, which goes on after this process; returns its address and its process.

    If Ray has tokens (since 2.52), it asks for one, which is made if there is none, unless RAY_AUTH_MODE is set.
    This process uses it, too, if it has not imported Ray before.

    Args:
        num_cpus: The CPUs that it is to have at least; they are only counted.
        timeout: Seconds to wait for it.

    Raises:
        ClusterError: It did not start in time, or has ended.
    """
    if "RAY_AUTH_MODE" not in os.environ and _has_token():
        os.environ["RAY_AUTH_MODE"] = "token"
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    cpus = max(os.cpu_count() or 1, math.ceil(num_cpus))
    command = [
        *_ray("start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"),
        *("--port", str(port), "--num-cpus", str(cpus)),
        *("--object-store-memory", str(_OBJECT_STORE_BYTES)),
    ]
    with tempfile.NamedTemporaryFile("w+", prefix="gradserve-ray-", suffix=".log", delete=False) as log:
        process = _spawn(command, log.fileno())
    running = LocalRay(process.pid, process.create_time(), port)
    _wait(process, running, Path(log.name), timeout)
    return f"{LOOPBACK}:{port}", running


def stop_local_ray(running: LocalRay) -> None:
    """Ends a Ray that `start_local_ray` has started, if it still runs, and waits until its processes are gone."""
    try:
        process = psutil.Process(running.pid)
        if process.create_time() != running.started:
            return
        processes = [process, *process.children(recursive=True)]
        process.terminate()
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs(processes, _STOP_SECONDS)
    for each in left:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            each.kill()
    psutil.wait_procs(left, _STOP_SECONDS)
    _forget(running.port)


def _forget(port: int) -> None:
    """Removes the note of Ray's address, as `ray stop` does: others would look for it there for a minute."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(folder) / "ray" / "ray_current_cluster"
    with suppress(OSError):
        if note.read_text().strip().endswith(f":{port}"):
            note.unlink()


def _spawn(command: list[str], log: int) -> psutil.Process:
    """Starts a process that nobody will wait for, out of reach of this terminal's signals."""
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    return psutil.Process(os.posix_spawn(command[0], command, os.environ, file_actions=files, setsid=True))


def _wait(process: psutil.Process, running: LocalRay, log: Path, timeout: float) -> None:
    end = time.monotonic() + timeout
    while _STARTED not in log.read_text(errors="replace"):
        try:
            how = f"has ended with exit status {process.wait(_LOOK_SECONDS)}"
        except psutil.TimeoutExpired:
            if time.monotonic() < end:
                continue
            how = f"did not start within {timeout:g} s"
        stop_local_ray(running)
        raise ClusterError(f"Ray {how}; its last words:\n{log.read_text(errors='replace')[-_LOG_TAIL:].strip()}")
    log.unlink()  # The process keeps it open; afterwards Ray has logs of its own.


def _has_token() -> bool:
    """True if Ray has tokens, after one was made if there was none."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    made = subprocess.run(_ray("get-auth-token", "--generate"), capture_output=True, check=False, umask=_OWN_FILES)
    return made.returncode == 0  # Ray before 2.52 has no such command.


def _ray(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]
