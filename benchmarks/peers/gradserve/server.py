"""The server as users start it, from the command line, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradserve
from benchmarks.peers.driver import Setup, run_server
from benchmarks.peers.gradserve.kernels import wait_for_kernels
from gradserve_server.config import RuntimeConfig

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0


@contextlib.contextmanager
def serve(setup: Setup) -> Iterator[dict[str, Any]]:
    """Runs `gradserve serve` on TCP ports that the system chooses, unless the case names them."""
    address_file = setup.scratch / "address"
    command = [sys.executable, "-m", "gradserve_server", "serve"]
    command += ["--listen", setup.options.get("listen", "127.0.0.1:0"), "--address-file", str(address_file)]
    match setup.options.get("transport"):
        case "shared_memory":
            command += ["--shared-memory-socket", str(setup.scratch / "shared-memory")]
        case "bulk" if "bulk_listen" in setup.options:
            command += ["--bulk-listen", setup.options["bulk_listen"]]
    if "cluster_size" in setup.options:
        index, size = (str(setup.options[name]) for name in ("cluster_index", "cluster_size"))
        command += ["--cluster", "bench", "--cluster-index", index, "--cluster-size", size]
    if "upstream" in setup.options:
        command += ["--upstream", setup.options["upstream"]]
        command += ["--upstream-workers", str(setup.options["upstream_workers"]), "--upstream-grace-seconds", "30"]
    if num_waiting := setup.options.get("num_waiting"):
        command += ["--max-connection-calls", str(2 * num_waiting)]
    if "durability" in setup.options:
        command += ["--state-dir", str(setup.scratch / "state")]
    command += ["--warm-up", "true"]
    # Others need the kernels of sums alone. Servers of earlier commits always load all kernels.
    if setup.options.keys() & {"op", "warm_up"} and "warm_up_ops" in RuntimeConfig.model_fields:
        command += ["--warm-up-ops", "true"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
        try:
            address = _wait_for_address(server, address_file)
            with gradserve.connect(address) as client:
                wait_for_kernels(client)
            yield {"address": address, "pid": server.pid}
        finally:
            server.terminate()
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_for_address(server: subprocess.Popen[bytes], address_file: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        if address_file.exists() and (lines := address_file.read_text(encoding="utf-8").splitlines()):
            return lines[0]
        time.sleep(0.02)
    raise TimeoutError("the server did not write its address")


if __name__ == "__main__":
    run_server(serve)
