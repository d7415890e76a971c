"""The commands in the documentation exist, take these arguments, and print what is printed."""

import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deploy.site.places import ROOT
from gradserve_server.commands.cli import cli
from gradserve_server.config.settings import SettingsError, make_config, read_settings
from tests.project.blocks.reading import Block, all_blocks
from tests.project.blocks.shell import Command, commands_in

BLOCKS = all_blocks("console", "sh", "bash")
OTHER_PROGRAMS = {
    ".": "of the shell",
    "apt-get": "installs packages of Debian",
    "build/cpp/parameters_worker": "tests/languages runs it",
    "build/cpp/words_worker": "tests/languages runs it",
    "buildah": "needs privileges; `make image` tries the image",
    "cd": "of the shell",
    "curl": "fetches from a server",
    "docker": "needs Docker; `make image` tries the image",
    "export": "of the shell",
    "git": "of the developer",
    "cat": "of the system",
    "grep": "of the system",
    "mkdir": "of the system",
    "grpcurl": "a tool of others for servers with reflection, which tests/rpc/server_info tries",
    "protoc": "a compiler of others",
    "python3": "tests/tutorial runs the program; the environment is that of the tests",
    "sed": "of the system",
    "sha256sum": "of the system",
    "source": "of the shell",
    "sudo": "the command after it is checked",
    "torchrun": "of PyTorch; tests/integrations runs it",
}
"""The programs of others, and why their arguments are not checked."""


def parsed(words: tuple[str, ...]) -> tuple[click.Command, click.Context]:
    """Parses the arguments of gradserve as it does itself, down to the last command."""
    command: click.Command = cli
    context = command.make_context("gradserve", list(words))
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        _name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, found.make_context(found.name or "", list(rest), parent=context)
    return command, context


def check_gradserve(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in command.variables.items():
        monkeypatch.setenv(name, value)
    refused = ""
    try:
        found, context = parsed(command.words[1:])
        if found.name == "serve":
            with context:
                make_config(read_settings(context.params, None))
    except click.exceptions.Exit:
        pass  # --help and --version end so
    except SettingsError as error:
        refused = f"Error: {error.message}\n"
    assert not refused or command.output == refused


def check_make(command: Command, _monkeypatch: pytest.MonkeyPatch) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in command.words[1:]:
        assert "=" in word or word.startswith("-") or word in targets


def check_python(command: Command, _monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = command.words[1:]
    if first == "-m":
        assert rest[0] in ("venv", "pip", "http.server") or importlib.util.find_spec(rest[0])
    elif not first.startswith("-"):
        assert (ROOT / first).exists() or first in ("train.py", "worker.py")


def check_pip(command: Command, _monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in command.words[1:]:
        if found := re.fullmatch(r"(?:\.|gradserve\S*)\[(.*)\]", word):
            assert set(found[1].split(",")) <= extras.keys()


def check_kubectl(command: Command, _monkeypatch: pytest.MonkeyPatch) -> None:
    for word in command.words[1:]:
        path = word.rpartition("=")[2]
        assert not path.startswith(("deploy/", "examples/")) or (ROOT / path).exists()


CHECKS: dict[str, Callable[[Command, pytest.MonkeyPatch], None]] = {
    "gradserve": check_gradserve,
    "kubectl": check_kubectl,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
}


def inner(command: Command) -> Command:
    """Returns the command of gradserve that runs in a container, or as another user; otherwise the command itself."""
    words = command.words
    for index, word in enumerate(words[1:], 1):
        is_ours = word == "gradserve" and words[index + 1 : index + 2] and words[index + 1] in cli.commands
        if is_ours or words[index - 1] == "sudo":
            return Command(command.variables, words[index:], command.output)
    return command


def check(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    program = command.words[0]
    assert program in CHECKS or program in OTHER_PROGRAMS, f"say in OTHER_PROGRAMS why {program} is not checked"
    if program in CHECKS:
        CHECKS[program](command, monkeypatch)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_exist_and_take_these_arguments(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [inner(command) for command in commands_in(block)]
    assert commands
    for command in commands:
        check(command, monkeypatch)


@pytest.mark.parametrize(
    "wrong",
    [
        "gradserve serv",
        "gradserve serve --no-such-flag",
        "gradserve serve --max-bytes '4 gigs'",
        "GRADSERVE_MAX_BITES=4GiB gradserve serve",
        "gradserve info localhost:1 and-more",
        "docker run --detach gradserve gradserve serve --no-such-flag",
        "kubectl apply -k deploy/kubernetes/overlays/no-such-overlay",
        "make no-such-target",
        "pip install '.[no-such-extra]'",
        "python no_such_file.py",
        "no-such-program",
    ],
)
def test_a_wrong_command_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = commands_in(Block("page.md", 1, "sh", wrong))
    with pytest.raises((AssertionError, click.UsageError)):
        check(inner(command), monkeypatch)


def runs() -> list[list[Block]]:
    """Returns the blocks whose commands are run; those that continue another are with it, in the same folder."""
    found: list[list[Block]] = []
    for block in BLOCKS:
        if "run" in block.said:
            if "continued" in block.said:
                found[-1].append(block)
            else:
                found.append([block])
    return found


@pytest.mark.parametrize("blocks", runs(), ids=lambda blocks: str(blocks[0]))
def test_commands_print_what_is_printed(blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        for command in commands_in(block):
            assert command.words[0] == "gradserve"
            result = CliRunner().invoke(cli, command.words[1:], env=command.variables)
            expected = re.escape(command.output.rstrip()).replace(re.escape("..."), r"\S+")
            assert re.fullmatch(expected, result.output.rstrip()), result.output
