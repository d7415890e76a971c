"""Long commands show how far they are on a terminal, and nowhere else."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.commands.conftest import CommandLine
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP

SHAPE = (5 << 20,)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a server that had averages of 20 MiB."""
    folder = tmp_path_factory.mktemp("state")
    state = StateConfig(state_dir=str(folder), durability="round")
    with (
        LocalServer(ServerConfig(state=state, runtime=NOT_WARMED_UP)) as server,
        gradserve.connect(server.address) as client,
    ):
        model = client.conditional_accumulator("float32", SHAPE, shared_name="model")
        model.apply_grad(np.ones(SHAPE, np.float32))
        model.take_grad(1)
    return folder


def on_terminal(*arguments: object) -> tuple[str, str]:
    """Runs a command whose standard error is a terminal; returns what it printed, and what the terminal got."""
    ours, theirs = pty.openpty()
    got = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # nobody has the terminal open any more
                return
            got.extend(part)

    reader = threading.Thread(target=read)
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "gradserve_server", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=theirs,
        ) as process:
            os.close(theirs)
            reader.start()
            printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
        reader.join(PATIENCE_SECONDS)
    finally:
        os.close(ours)
    return printed.decode(), got.decode()


def test_reading_a_state_directory(directory: Path) -> None:
    printed, terminal = on_terminal("state", "check", directory)
    assert printed.endswith("1 accumulators, 0 layers, 0 parameters, nothing is damaged\n")
    assert terminal.startswith("\rreading [                        ]   0 %  0.0 of 20.0 MiB, ")
    assert "\rreading [########################] 100 %  20.0 of 20.0 MiB, " in terminal
    assert terminal.endswith("\x1b[K\r\n"), "what comes next begins a line"
    printed, terminal = on_terminal("state", "repair", directory)
    assert "100 %  20.0 of 20.0 MiB, " in terminal


@pytest.mark.exhaustive
def test_writing_an_average(directory: Path, tmp_path: Path) -> None:
    printed, terminal = on_terminal("state", "export", directory, "model", tmp_path / "a.npz")
    assert printed.startswith(f"{tmp_path}/a.npz: ")
    with np.load(tmp_path / "a.npz") as saved:
        assert saved["average"].shape == SHAPE
    for word in ("reading", "writing"):
        assert f"\r{word} [########################] 100 %  20.0 of 20.0 MiB, " in terminal


@pytest.mark.exhaustive
def test_measuring(command_line: CommandLine) -> None:
    quickly = ("bench", command_line.address, "--seconds", "0.01", "--size", "64KiB", "--way", "grpc")
    _, terminal = on_terminal(*quickly)
    assert "measuring" in terminal
    assert "100%" in terminal
    printed, terminal = on_terminal(*quickly, "--json")
    assert printed.startswith("{")
    assert terminal == ""


@pytest.mark.parametrize(
    "command",
    [
        lambda directory, _: ("state", "check", directory),
        lambda directory, _: ("state", "repair", directory),
        lambda directory, folder: ("state", "export", directory, "model", folder / "a.npz"),
    ],
)
def test_nothing_is_shown_elsewhere(directory: Path, tmp_path: Path, command: Callable[[Path, Path], Any]) -> None:
    done = CliRunner().invoke(cli, list(map(str, command(directory, tmp_path))))
    assert done.exit_code == 0
    assert done.stderr == ""
