"""`gradserve completion`."""

import os
import socket
import subprocess

import pytest
from click.shell_completion import BashComplete

import gradserve
from gradserve_server.commands import servers
from gradserve_server.commands.cli import cli
from tests.commands.conftest import CommandLine
from tests.servers.connecting import no_server
from tests.servers.polling import PATIENCE_SECONDS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(command_line: CommandLine, shell: str) -> None:
    script = command_line.run("completion", shell).stdout
    assert "_GRADSERVE_COMPLETE" in script
    assert "gradserve" in script


def test_bash_can_read_its_script(command_line: CommandLine) -> None:
    script = command_line.run("completion", "bash").stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=PATIENCE_SECONDS)


def complete(words: str, incomplete: str = "") -> list[str]:
    """Returns what a shell offers after these words."""
    found = BashComplete(cli, {}, "gradserve", "_GRADSERVE_COMPLETE").get_completions(words.split(), incomplete)
    return [each.value for each in found]


@pytest.fixture
def things(client: gradserve.Client, local_variables: None, trained: str) -> gradserve.TensorHandle:
    """An accumulator, others in a container, a layer, parameters and a tensor; returns the handle of the tensor."""
    for name in ("first", "second"):
        client.conditional_accumulator("float32", (), shared_name=name, container="completed")
    client.batch_norm(scope="norm", container="completed")
    client.parameters({"w": [1.0]}, shared_name="llm", container="completed")
    return client.put([1.0])


@pytest.fixture
def local_variables(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_ADDRESS", command_line.address)


def test_names_are_completed(
    things: gradserve.TensorHandle, trained: str, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained in complete("show accumulator")
    assert complete("show accumulator", "trai") == [trained]
    assert complete("rm --container completed accumulators") == ["first", "second"]
    assert complete("rm --container completed accumulators second") == ["first"], "one is there already"
    assert complete("show layer --container completed") == ["norm"]
    assert complete("show parameters --container completed") == ["llm"]
    assert complete("parameters save --container completed", "l") == ["llm"]
    assert things.handle in complete("rm tensors", things.handle[:2])
    assert complete("show nonsense") == []
    monkeypatch.delenv("GRADSERVE_ADDRESS")
    assert complete(f"show --address {command_line.address} accumulator", "trai") == [trained]


@pytest.mark.parametrize("problem", ["nobody", "no address", "no file"])
def test_whatever_is_wrong_nothing_is_said(
    problem: str, local_variables: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with no_server() as nobody:
        if problem == "nobody":
            monkeypatch.setenv("GRADSERVE_ADDRESS", nobody)
        elif problem == "no address":
            monkeypatch.setenv("GRADSERVE_ADDRESS", "not:an:address")
        else:
            monkeypatch.setenv("GRADSERVE_TLS_CA", os.devnull + "/ca.pem")
        assert complete("show accumulator") == []
    assert capfd.readouterr() == ("", "")


def test_a_silent_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(servers, "_COMPLETION_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("GRADSERVE_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        assert complete("show accumulator") == []
    assert capfd.readouterr() == ("", "")
