"""Settings: flags, then variables, then the file, then defaults; what cannot be is refused in one line."""

import json
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import gradserve
from deploy.site.reference.settings import write_settings
from gradserve_protocol.variables import CONNECT_VARIABLES, VARIABLES, WORKER_VARIABLES
from gradserve_server.commands.cli import cli
from gradserve_server.config import ServerConfig
from gradserve_server.config.fields import Expected
from gradserve_server.config.settings import config_options, make_config, read_settings


@click.command()
@click.option("--config", type=click.Path(path_type=Path))
@config_options
def show_config(config: Path | None, **flags: Any) -> None:
    click.echo(make_config(read_settings(flags, config)).model_dump_json())


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADSERVE_CONFIG", "GRADSERVE_ADDRESS", "GRADSERVE_LISTEN", "GRADSERVE_WARM_UP", "GRPC_VERBOSITY"):
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
        (["--max-device-bytes", "8GiB"], {}, None, "limits", "max_device_bytes", 8 << 30),
        ([], {"GRADSERVE_MAX_DEVICE_BYTES": "1 GB"}, None, "limits", "max_device_bytes", 10**9),
        ([], {}, "pool_bytes = 0", "runtime", "pool_bytes", 0),
        (["--accumulator-device", "cuda:1"], {}, None, "runtime", "accumulator_device", "cuda:1"),
        (["--accumulator-device", "auto"], {}, None, "runtime", "accumulator_device", "auto"),
        ([], {}, None, "runtime", "accumulator_device", "cpu"),
        (["--drain-seconds", "0.5"], {}, None, "runtime", "drain_seconds", 0.5),
        ([], {}, "default_lease_seconds = 5", "leases", "default_lease_seconds", 5.0),
        ([], {}, None, "listen", "listen", ["127.0.0.1:50051"]),
        (["--listen", "[::1]:1", "--listen", "unix:/a"], {}, None, "listen", "listen", ["[::1]:1", "unix:/a"]),
        ([], {"GRADSERVE_LISTEN": "127.0.0.1:1 unix:/a"}, None, "listen", "listen", ["127.0.0.1:1", "unix:/a"]),
        ([], {}, 'listen = ["127.0.0.1:1", "unix:/a"]', "listen", "listen", ["127.0.0.1:1", "unix:/a"]),
        (["--listen", "a:1"], {"GRADSERVE_LISTEN": "b:1"}, 'listen = ["c:1"]', "listen", "listen", ["a:1"]),
        (["--listen", "localhost"], {}, None, "listen", "listen", ["localhost:50051"]),
        ([], {}, 'log_level = "debug"', "runtime", "log_level", "debug"),
        ([], {"GRADSERVE_LOG_LEVEL": "ERROR"}, 'log_level = "debug"', "runtime", "log_level", "error"),
        (["--log-level", "warning"], {"GRADSERVE_LOG_LEVEL": "error"}, None, "runtime", "log_level", "warning"),
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


SIZE = "expected a size such as 4GiB or 512MiB, got"
COUNT = "expected a whole number from 1 to 2147483647, got"
SECONDS = "expected a number of seconds greater than 0, such as 0.5 or 600, got"
ADDRESS = "expected an address, HOST:PORT or unix:PATH, got"
ADDRESSES = 'expected a list of addresses such as ["0.0.0.0:50051", "unix:/run/gradserve.sock"], got'


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-bytes", "4 gigs"], f"--max-bytes: {SIZE} '4 gigs'"),
        (["--max-bytes", "-1"], f"--max-bytes: {SIZE} '-1'"),
        (["--max-bytes", "0"], f"--max-bytes: {SIZE} '0'"),
        (["--max-device-bytes", "0"], f"--max-device-bytes: {SIZE} '0'"),
        (["--max-bytes", "9EiB"], f"--max-bytes: {SIZE} '9EiB'"),
        (["--max-bytes", ""], f"--max-bytes: {SIZE} ''"),
        (["--max-message-bytes", "1MiB"], "expected a size from 4MiB to less than 2GiB, such as 16MiB, got '1MiB'"),
        (["--max-message-bytes", "2GiB"], "expected a size from 4MiB to less than 2GiB, such as 16MiB, got '2GiB'"),
        (["--pool-bytes", "-1"], "--pool-bytes: expected a size such as 4GiB or 512MiB, or 0, got '-1'"),
        (["--max-handles", "0"], f"--max-handles: {COUNT} '0'"),
        (["--max-handles", "1e3"], f"--max-handles: {COUNT} '1e3'"),
        (["--max-waiters", "2147483648"], f"--max-waiters: {COUNT} '2147483648'"),
        (["--compute-threads", "two"], "--compute-threads: expected a whole number from 1 to 1024, got 'two'"),
        (["--drain-seconds", "nan"], f"--drain-seconds: {SECONDS} 'nan'"),
        (["--drain-seconds", "1m"], f"--drain-seconds: {SECONDS} '1m'"),
        (["--max-lease-seconds", "1e10"], f"--max-lease-seconds: {SECONDS} '1e10'"),
        (["--device", "gpu"], "--device: expected cpu, cuda, cuda:N or auto, got 'gpu'"),
        (["--accumulator-device", "gpu"], "--accumulator-device: expected cpu, cuda:N or auto, got 'gpu'"),
        (["--warm-up", "maybe"], "--warm-up: expected true or false, got 'maybe'"),
        (["--log-level", "loud"], "--log-level: expected debug, info, warning or error, got 'loud'"),
        (["--address-file", ""], "--address-file: expected the path of a file, got ''"),
        (["--listen", "127.0.0.1:99999"], f"--listen: {ADDRESS} '127.0.0.1:99999'; a port is a number from 1 to 65535"),
        (["--listen", "a", "--listen", "a:50051"], "--listen: expected each address once, got 'a:50051' twice"),
        (["--max-handles", "0", "--device", "gpu"], f"--max-handles: {COUNT} '0'; --device: expected cpu, cuda"),
    ],
)
def test_a_bad_flag_says_what_was_expected(tmp_path: Path, flags: list[str], message: str) -> None:
    result = configure(tmp_path, *flags)
    assert result.exit_code == 2
    assert result.output.startswith("Error: --")
    assert message in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("max_bytes = -1", f"max_bytes: {SIZE} -1"),
        ("max_bytes = true", f"max_bytes: {SIZE} True"),
        ("max_handles = true", f"max_handles: {COUNT} True"),
        ("max_handles = 1.5", f"max_handles: {COUNT} 1.5"),
        ("drain_seconds = true", f"drain_seconds: {SECONDS} True"),
        ("drain_seconds = inf", f"drain_seconds: {SECONDS} inf"),
        ("device = 0", "device: expected cpu, cuda, cuda:N or auto, got 0"),
        ("log_level = 10", "log_level: expected debug, info, warning or error, got 10"),
        ("listen = []", f"listen: {ADDRESSES} []"),
        ('listen = "127.0.0.1:1"', f"listen: {ADDRESSES} '127.0.0.1:1'"),
        ("listen = [50051]", f"listen: {ADDRESSES} 50051"),
        ('listen = ["a", ""]', f"listen: {ADDRESS} ''; examples are"),
    ],
)
def test_a_bad_value_in_the_file_says_where_it_is(tmp_path: Path, toml: str, message: str) -> None:
    result = configure(tmp_path, toml=toml)
    assert result.exit_code == 2
    assert f"Error: {tmp_path / 'gradserve.toml'}: {message}" in result.output


def test_every_setting_says_in_words_what_it_takes(tmp_path: Path) -> None:
    for concern in ServerConfig().model_fields_set | set(ServerConfig.model_fields):
        for name, field in type(getattr(ServerConfig(), concern)).model_fields.items():
            (expected,) = [each.words for each in field.metadata if isinstance(each, Expected)]
            result = configure(tmp_path, toml=f"{name} = 2026-01-01")
            assert f"{name}: expected {expected}, got datetime.date(2026, 1, 1)" in result.output


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("max_bites = 1", "max_bites; did you mean max_bytes?"),
        ("max-bytes = 1", "max-bytes; did you mean max_bytes?"),
        ("[limits]\nmax_bytes = 1", "limits; "),
        ("config = 'a'", "config; "),
        ("colour = 1", "colour; expected one of access, accumulator_device, "),
    ],
)
def test_unknown_names_in_the_file(tmp_path: Path, toml: str, message: str) -> None:
    result = configure(tmp_path, toml=toml)
    assert result.exit_code == 2
    assert f"Error: unknown setting in {tmp_path / 'gradserve.toml'}: {message}" in result.output


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GRADSERVE_MAX_BITES", "1", "did you mean GRADSERVE_MAX_BYTES?"),
        ("GRADSERVE_LOGLEVEL", "debug", "did you mean GRADSERVE_LOG_LEVEL?"),
        ("GRADSERVE_ADRESS", "localhost", "did you mean GRADSERVE_ADDRESS?"),
        ("GRADSERVE_CONFIGURATION", "a", "did you mean GRADSERVE_CONFIG?"),
        (
            "GRADSERVE_PORT",
            "50052",
            "expected one of GRADSERVE_ACCESS, GRADSERVE_ACCUMULATOR_DEVICE, GRADSERVE_ADDRESS, ",
        ),
        ("GRADSERVE_", "1", "expected one of"),
    ],
)
def test_unknown_variables(tmp_path: Path, variable: str, value: str, message: str) -> None:
    result = configure(tmp_path, env={variable: value})
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: unknown environment variable: {variable}; ")
    assert message in result.output
    shown = result.output.partition("expected one of ")[2].strip().split(", ")
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GRADSERVE_ADDRESS", "localhost:1"),
        *[(each, "1") for each in (*VARIABLES, *WORKER_VARIABLES) if each != "GRADSERVE_TRACING"],
        ("GRADSERVE_PORT", "tcp://10.0.0.1:50051"),
        ("GRADSERVE_PORT_50051_TCP", "tcp://10.0.0.1:50051"),
        ("GRADSERVE_PORT_50051_TCP_ADDR", "10.0.0.1"),
        ("GRADSERVE_PORT_50051_TCP_PORT", "50051"),
        ("GRADSERVE_PORT_50051_TCP_PROTO", "tcp"),
        ("GRADSERVE_SERVICE_HOST", "10.0.0.1"),
        ("GRADSERVE_SERVICE_PORT", "50051"),
        ("GRADSERVE_SERVICE_PORT_GRPC", "50051"),
        ("GRADSERVE_EAST_SERVICE_HOST", "10.0.0.1"),
        ("GRADSERVE_EAST_PORT", "tcp://10.0.0.1:50051"),
        ("GRADSERVED", "1"),
    ],
)
def test_variables_that_are_no_settings(tmp_path: Path, variable: str, value: str) -> None:
    """Kubernetes gives every container some of a service that is called gradserve."""
    assert configure(tmp_path, env={variable: value}).exit_code == 0


def test_the_variables_of_the_client_are_all_known() -> None:
    sources = Path(gradserve.__file__).parent.rglob("*.py")
    named = {name for each in sources for name in re.findall(r"GRADSERVE_[A-Z_]+[A-Z]", each.read_text())}
    assert named - set(CONNECT_VARIABLES) == set(VARIABLES)


@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "pipe", "too long", "brackets", "digits"])
def test_an_unreadable_file_says_so(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "settings"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "too long":
        path.write_text("#" * ((1 << 20) + 1))
    elif kind == "brackets":
        path.write_text("a = " + "[" * 5000)
    elif kind == "digits":
        path.write_text("a = " + "1" * 5000)
    result = CliRunner().invoke(show_config, ["--config", str(path)])
    assert result.exit_code == 2
    assert f"cannot read the configuration file {path}" in result.output


def test_every_setting_has_a_flag_that_help_explains_and_a_section_in_the_reference(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", "--help"])
    assert result.exit_code == 0
    write_settings(tmp_path)
    reference = (tmp_path / "settings.md").read_text()
    for section in ServerConfig.model_fields:
        for name in type(getattr(ServerConfig(), section)).model_fields:
            assert f"--{name.replace('_', '-')} " in result.output
            assert f"\n### `{name}` " in reference


METAVARS = {
    "ADDRESS": ["listen", "bulk_listen", "http_listen", "upstream"],
    "BOOLEAN": ["tracing", "warm_up"],
    "FILE": ["access", "address_file", "rounds_file", "tls_certificate", "tls_client_ca", "tls_key"],
    "FRACTION": ["reserved_share"],
    "HOST": ["http_host"],
    "N": ["cluster_index", "cluster_size", "compute_threads", "max_calls", "upstream_workers"],
    "NAME": ["cluster"],
    "PATH": ["shared_memory_socket", "state_dir"],
    "SECONDS": ["event_loop_warning_seconds", "drain_seconds", "upstream_grace_seconds"],
    "SIZE": ["max_bytes", "max_device_bytes", "min_arrival_rate", "pool_bytes"],
}


def test_the_help_says_what_each_setting_takes() -> None:
    shown = {each.name: each.metavar for each in show_config.params if isinstance(each, click.Option)}
    for metavar, names in METAVARS.items():
        assert {name: shown[name] for name in names} == dict.fromkeys(names, metavar)
    units = {"_seconds": "SECONDS", "_bytes": "SIZE", "_file": "FILE"}
    for ending, metavar in units.items():
        assert {shown[name] for name in shown if name and name.endswith(ending)} == {metavar}
