"""The address of a server: as ADDRESS and as --address, for all commands."""

import pytest
from click.testing import CliRunner

from gradserve_server.commands.cli import cli
from tests.commands.conftest import CommandLine
from tests.servers.connecting import no_server

COMMANDS = {
    "health": ["health"],
    "info": ["info"],
    "ls": ["ls"],
    "ls tensors": ["ls", "tensors"],
    "show": ["show", "accumulator", "trained/net"],
    "top": ["top", "--json"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_takes_both(command_line: CommandLine, trained: str, command: list[str]) -> None:
    there = command_line.address
    with no_server() as elsewhere:
        for words, variable in (
            ([there], elsewhere),
            (["--address", there], elsewhere),
            (["-a", there], elsewhere),
            (["--address", there, there], elsewhere),
            ([], there),
        ):
            done = CliRunner().invoke(cli, [*command, *words], env={"GRADSERVE_ADDRESS": variable})
            assert done.exit_code == 0, (command, words, done.output)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_two_different_ones_are_refused(command_line: CommandLine, command: list[str]) -> None:
    done = command_line.run(*command, command_line.address, "--address", "other:50051")
    assert done.exit_code == 2
    assert f"got '{command_line.address}' as ADDRESS and 'other:50051' as --address" in done.output


def test_bench_takes_both() -> None:
    """Refused addresses show that both are read."""
    for words in (["ftp://server"], ["--address", "ftp://server"]):
        done = CliRunner().invoke(cli, ["bench", *words])
        assert done.exit_code == 2
        assert "leave out 'ftp://'" in done.output


def test_bench_names_ways_as_connect_does(command_line: CommandLine) -> None:
    for option in ("--transport", "--way"):
        found = command_line.json("bench", option, "grpc", "--seconds", "0.01", "--size", "4KiB")
        assert [each["way"] for each in found["ways"]] == ["grpc"]


def test_rm_takes_every_word_for_a_name(command_line: CommandLine) -> None:
    done = command_line.run("rm", "accumulator", "no-such", "--yes", "--address", command_line.address)
    assert (done.exit_code, done.stderr) == (1, f"Error: no accumulators no-such on {command_line.address}\n")
