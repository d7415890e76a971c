"""`gradserve completion`."""

import subprocess

import pytest

from tests.commands.conftest import CommandLine


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(command_line: CommandLine, shell: str) -> None:
    script = command_line.run("completion", shell).stdout
    assert "_GRADSERVE_COMPLETE" in script
    assert "gradserve" in script


def test_bash_can_read_its_script(command_line: CommandLine) -> None:
    script = command_line.run("completion", "bash").stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
