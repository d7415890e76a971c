"""The command line: help, `serve`, `health` and `info`; messages that say what to do."""

import importlib.metadata
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradserve
from gradserve.testing import ServerProcess
from gradserve_server.commands.cli import cli
from tests.servers.command_line import run_cli
from tests.servers.polling import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADSERVE_CONFIG", "GRADSERVE_ADDRESS", "GRADSERVE_LISTEN", "GRPC_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["health", "--help"], ["info", "-h"]])
def test_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")


def test_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert result.exit_code == 0
    assert importlib.metadata.version("gradserve") in result.output


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with three addresses."""
    folder = tmp_path_factory.mktemp("everywhere")
    with ServerProcess(folder, listen=("127.0.0.1:0", "localhost:0", f"unix:{folder}/socket")) as process:
        yield process


def test_every_address_serves(everywhere: ServerProcess) -> None:
    first, second, local = everywhere.addresses
    assert first.startswith("127.0.0.1:")
    assert second.startswith("localhost:")
    assert local.startswith("unix:/")
    assert not {first, second} & {"127.0.0.1:0", "localhost:0"}
    with gradserve.connect(first) as client:
        acc = client.conditional_accumulator("float32", (2,), "w")
        acc.apply_grad([1, 2])
        for address in everywhere.addresses:
            with gradserve.connect(address, timeout=PATIENCE_SECONDS) as other:
                assert other.conditional_accumulator("float32", (2,), "w").num_accumulated() == 1


def test_health_and_info_of_a_serving_server(everywhere: ServerProcess) -> None:
    for address in everywhere.addresses:
        health = CliRunner().invoke(cli, ["health", address])
        assert (health.exit_code, health.output) == (0, f"{address}: SERVING\n")
    info = CliRunner().invoke(cli, ["info"], env={"GRADSERVE_ADDRESS": everywhere.address})
    assert info.exit_code == 0
    assert f"gradserve {importlib.metadata.version('gradserve')}, up " in info.output
    for line in ("  cpu: ", "limits:", "  max_bytes: ", "in use:", "  num_waiters: 0"):
        assert line in info.output
    assert ("\n  no GPU: " in info.output) != ("\n  cuda:0: " in info.output)


def closed_port() -> tuple[socket.socket, str]:
    """Returns the address of a port that is taken, but that nobody listens at."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken, f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", ["health", "info"])
def test_unreachable(command: str) -> None:
    taken, address = closed_port()
    with taken:
        result = CliRunner().invoke(cli, [command, address, "--timeout", "10"])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {address}: ")


def test_health_as_json(everywhere: ServerProcess) -> None:
    address = everywhere.address
    health = CliRunner().invoke(cli, ["health", address, "--json"])
    assert (health.exit_code, health.stderr) == (0, "")
    assert json.loads(health.stdout) == {"address": address, "serves": True, "status": "SERVING", "reason": ""}
    taken, address = closed_port()
    with taken:
        health = CliRunner().invoke(cli, ["health", address, "--json", "--timeout", "10"])
    assert (health.exit_code, health.stderr) == (1, "")
    said = json.loads(health.stdout)
    assert said.pop("reason").startswith("no connection: ")
    assert said == {"address": address, "serves": False, "status": "UNAVAILABLE"}


def test_nothing_else_is_written_about_an_unreachable_server() -> None:
    taken, address = closed_port()
    with taken:
        done = run_cli("info", address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {address}: no connection: is gradserve serve running at {address}? (")
    assert done.stderr.count("\n") == 1


def test_the_library_leaves_the_environment_alone() -> None:
    """The command line keeps gRPC from writing to the terminal by a variable."""
    program = (
        "import os; before = {**os.environ}; import gradserve.aio, gradserve_server.app; print(before == os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("command", ["health", "info"])
def test_silent_server(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(cli, [command, address, "--timeout", "0.2"])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {address}: ")


def test_serve_refuses_a_bad_configuration() -> None:
    done = run_cli("serve", "--listen", "127.0.0.1:0", env={"GRADSERVE_MAX_BYTES": "-5"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: GRADSERVE_MAX_BYTES: expected a size such as 4GiB or 512MiB, got '-5'\n"


def test_serve_reads_file_variables_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gradserve.toml"
    config.write_text('max_bytes = "1MiB"\nmax_handles = 5\nmax_waiters = 6\n')
    monkeypatch.setenv("GRADSERVE_CONFIG", str(config))
    monkeypatch.setenv("GRADSERVE_MAX_HANDLES", "7")
    monkeypatch.setenv("GRADSERVE_MAX_WAITERS", "8")
    with ServerProcess(tmp_path, "--max-waiters", "9") as process, gradserve.connect(process.address) as client:
        limits = client.server_info().limits
    assert (limits["max_bytes"], limits["max_handles"], limits["max_waiters"]) == (1 << 20, 7, 9)
