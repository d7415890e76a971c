"""The exit codes of the commands."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradserve_server.commands.cli import cli
from gradserve_server.commands.wording import ExitCode, exit_codes
from gradserve_server.config.settings import SettingsError
from tests.servers.connecting import no_server

CASES = [
    ("--help", ExitCode.DONE),
    ("--version", ExitCode.DONE),
    ("completion bash", ExitCode.DONE),
    ("certificates {folder}", ExitCode.DONE),
    ("token worker-1 --access {folder}/access.toml", ExitCode.DONE),
    ("plan --workers 4 --model-bytes 1MiB --bandwidth 10Gbit", ExitCode.DONE),
    ("health {server}", ExitCode.DONE),
    ("info {server}", ExitCode.DONE),
    ("ls {server}", ExitCode.DONE),
    ("doctor {server}", ExitCode.DONE),
    ("top {server}", ExitCode.DONE),
    ("health {nobody} --timeout 0.5", ExitCode.FAILED),
    ("health {server},{nobody} --timeout 0.5", ExitCode.FAILED),
    ("info {nobody} --timeout 0.5", ExitCode.FAILED),
    ("ls {nobody} --timeout 0.5", ExitCode.FAILED),
    ("doctor {nobody}", ExitCode.FAILED),
    ("ls {server},{nobody} --timeout 0.5", ExitCode.FAILED),
    ("top {nobody} --timeout 0.5", ExitCode.FAILED),
    ("bench {nobody} --timeout 0.5", ExitCode.FAILED),
    ("show accumulator nobody {server}", ExitCode.FAILED),
    ("rm accumulator nobody --yes --address {server}", ExitCode.FAILED),
    ("state check {folder}/nowhere", ExitCode.FAILED),
    ("state check {folder}", ExitCode.FAILED),
    ("nothing", ExitCode.USAGE),
    ("health --nothing", ExitCode.USAGE),
    ("health host:port", ExitCode.USAGE),
    ("doctor host:port", ExitCode.USAGE),
    ("info {server} --tls-ca {folder}/nowhere", ExitCode.USAGE),
    ("ls nothing {server}", ExitCode.USAGE),
    ("serve --max-bytes much", ExitCode.USAGE),
    ("serve --config {folder}/nowhere.toml", ExitCode.USAGE),
    ("plan --workers 4 --model-bytes 1MiB --required 5", ExitCode.USAGE),
]


@pytest.fixture
def nobody() -> Iterator[str]:
    with no_server() as address:
        yield address


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[line for line, _ in CASES])
def test_exit_code(line: str, expected: ExitCode, server_address: str, nobody: str, tmp_path: Path) -> None:
    (tmp_path / "access.toml").touch()
    arguments = line.format(server=server_address, nobody=nobody, folder=tmp_path).split()
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == expected, done.output


def test_the_numbers_stay() -> None:
    assert [int(each) for each in ExitCode] == [0, 1, 2]
    assert SettingsError.exit_code == ExitCode.USAGE


def test_help_lists_them() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    found = re.findall(r"^ +(\d+(?: \+ N)?) +(.+)$", text.partition("Exit codes:")[2], re.MULTILINE)
    assert found == exit_codes()
