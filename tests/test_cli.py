"""The command line: flags, variables and the file; addresses; messages that say what to do."""

import importlib.metadata
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import gradserve
from gradserve_server.cli import cli
from gradserve_server.config import ServerConfig
from gradserve_server.settings import config_options, load_config
from tests.server_process import ServerProcess, run_cli


@click.command()
@click.option("--config", type=click.Path(path_type=Path))
@config_options
def show_config(config: Path | None, **flags: Any) -> None:
    click.echo(load_config(flags, config).model_dump_json())


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADSERVE_CONFIG", "GRADSERVE_ADDRESS", "GRADSERVE_LISTEN"):
        monkeypatch.delenv(name, raising=False)


def configure(tmp_path: Path, *flags: str, env: dict[str, str] | None = None, toml: str | None = None) -> Result:
    arguments = list(flags)
    if toml is not None:
        (tmp_path / "gradserve.toml").write_text(toml)
        arguments += ["--config", str(tmp_path / "gradserve.toml")]
    return CliRunner().invoke(show_config, arguments, env=env)


@pytest.mark.parametrize(
    ("flags", "env", "toml", "section", "setting", "expected"),
    [
        ([], {}, None, "limits", "max_handles", ServerConfig().limits.max_handles),
        ([], {}, "max_handles = 3", "limits", "max_handles", 3),
        ([], {"GRADSERVE_MAX_HANDLES": "4"}, "max_handles = 3", "limits", "max_handles", 4),
        (["--max-handles", "5"], {"GRADSERVE_MAX_HANDLES": "4"}, "max_handles = 3", "limits", "max_handles", 5),
        (["--max-handles", "5"], {}, "max_handles = 3", "limits", "max_handles", 5),
        (["--max-handles", "5"], {}, "max_waiters = 3", "limits", "max_waiters", 3),
        (["--max-bytes", "4GiB"], {}, None, "limits", "max_bytes", 4 << 30),
        ([], {"GRADSERVE_MAX_BYTES": "4096"}, None, "limits", "max_bytes", 4096),
        ([], {}, 'max_bytes = "2 MB"', "limits", "max_bytes", 2_000_000),
        ([], {}, "max_bytes = 7", "limits", "max_bytes", 7),
        ([], {}, "pool_bytes = 0", "runtime", "pool_bytes", 0),
        (["--drain-seconds", "0.5"], {}, None, "runtime", "drain_seconds", 0.5),
        ([], {}, "default_lease_seconds = 5", "leases", "default_lease_seconds", 5.0),
        ([], {}, None, "listen", "listen", ["127.0.0.1:50051"]),
        (["--listen", "[::1]:1", "--listen", "unix:/a"], {}, None, "listen", "listen", ["[::1]:1", "unix:/a"]),
        ([], {"GRADSERVE_LISTEN": "127.0.0.1:1 unix:/a"}, None, "listen", "listen", ["127.0.0.1:1", "unix:/a"]),
        ([], {}, 'listen = ["127.0.0.1:1", "unix:/a"]', "listen", "listen", ["127.0.0.1:1", "unix:/a"]),
        (["--listen", "a:1"], {"GRADSERVE_LISTEN": "b:1"}, 'listen = ["c:1"]', "listen", "listen", ["a:1"]),
    ],
)
def test_flags_then_variables_then_file_then_defaults(
    tmp_path: Path,
    flags: list[str],
    env: dict[str, str],
    toml: str | None,
    section: str,
    setting: str,
    expected: object,
) -> None:
    result = configure(tmp_path, *flags, env=env, toml=toml)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)[section][setting] == expected


@pytest.mark.parametrize(
    ("flags", "env", "toml", "message"),
    [
        ([], {}, "max_bites = 1", "unknown settings ['max_bites']; expected some of"),
        ([], {}, "[limits]\nmax_bytes = 1", "unknown settings ['limits']"),
        ([], {}, "max_bytes = ", "cannot read the configuration file"),
        ([], {}, "max_bytes = -1", "max_bytes: could not parse value and unit from byte string, got -1"),
        (["--max-bytes", "-1"], {}, None, "max_bytes: "),
        (["--max-bytes", "many"], {}, None, "got 'many'"),
        (["--max-handles", "0"], {}, None, "max_handles: Input should be greater than 0, got '0'"),
        (["--drain-seconds", "nan"], {}, None, "drain_seconds: "),
        (["--max-handles", "0", "--id-window", "0"], {}, None, "id_window: "),
        ([], {"GRADSERVE_COMPUTE_THREADS": "two"}, None, "compute_threads: "),
        ([], {}, "listen = []", "listen: "),
        ([], {}, 'listen = "127.0.0.1:1"', "listen: "),
    ],
)
def test_a_bad_configuration_says_what_is_wrong(
    tmp_path: Path, flags: list[str], env: dict[str, str], toml: str | None, message: str
) -> None:
    result = configure(tmp_path, *flags, env=env, toml=toml)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_an_unreadable_file_says_so(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "settings"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(show_config, ["--config", str(path)])
    assert result.exit_code == 2
    assert f"cannot read the configuration file {path}" in result.output


def test_every_setting_has_a_flag_that_help_explains() -> None:
    result = CliRunner().invoke(cli, ["serve", "--help"])
    assert result.exit_code == 0
    for section in ServerConfig.model_fields:
        for name in type(getattr(ServerConfig(), section)).model_fields:
            assert f"--{name.replace('_', '-')} " in result.output


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
            with gradserve.connect(address, timeout=10) as other:
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


@pytest.mark.parametrize("command", ["health", "info"])
def test_silent_server(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(cli, [command, address, "--timeout", "0.2"])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {address}: ")


@pytest.mark.parametrize(
    "cause", ["port in use", "no such host", "no such folder", "bad port", "no folder for the socket"]
)
def test_serve_says_why_it_cannot(tmp_path: Path, cause: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        nowhere = tmp_path / "nowhere"
        flags, expected = {
            "port in use": (["--listen", in_use], f"cannot listen on {in_use}"),
            "no such host": (["--listen", "192.0.2.1:0"], "cannot listen on 192.0.2.1:0"),
            "bad port": (["--listen", "127.0.0.1:http-ish"], "cannot listen on 127.0.0.1:http-ish"),
            "no folder for the socket": (["--listen", f"unix:{nowhere}/socket"], f"cannot listen on unix:{nowhere}"),
            "no such folder": (["--listen", "127.0.0.1:0", "--address-file", f"{nowhere}/file"], str(nowhere)),
        }[cause]
        done = run_cli("serve", *flags)
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_refuses_a_bad_configuration() -> None:
    done = run_cli("serve", "--listen", "127.0.0.1:0", env={"GRADSERVE_MAX_BYTES": "-5"})
    assert done.returncode == 2
    assert "max_bytes" in done.stderr


def test_serve_reads_file_variables_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gradserve.toml"
    config.write_text('max_bytes = "1MiB"\nmax_handles = 5\nmax_waiters = 6\n')
    monkeypatch.setenv("GRADSERVE_CONFIG", str(config))
    monkeypatch.setenv("GRADSERVE_MAX_HANDLES", "7")
    monkeypatch.setenv("GRADSERVE_MAX_WAITERS", "8")
    with ServerProcess(tmp_path, "--max-waiters", "9") as process, gradserve.connect(process.address) as client:
        limits = client.server_info().limits
    assert (limits["max_bytes"], limits["max_handles"], limits["max_waiters"]) == (1 << 20, 7, 9)


def test_the_address_file_is_replaced_in_one_step_once_serving(tmp_path: Path) -> None:
    """Whoever finds the file can connect; nothing else is left in the folder."""
    stale = tmp_path / "addresses"
    with ServerProcess(tmp_path) as process:
        assert stale.read_text() == f"{process.address}\n"
        with gradserve.connect(process.address, timeout=5) as client:
            client.server_info()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["addresses", "log"]
