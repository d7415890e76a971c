"""The kernels that a server compiles: those of sums at its start, those of an op when it is called, and no others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve.testing import ServerProcess
from gradserve_server.commands.cli import cli
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.devices.host import jit
from gradserve_server.devices.host.kernels import KernelTable
from gradserve_server.devices.host.loading import KernelCompiler
from gradserve_server.devices.host.reduction import REDUCTION
from gradserve_server.ops.activation.cpu import IN_FLOAT64
from gradserve_server.ops.layer_norm.cpu import LAYER_NORM
from gradserve_server.parameters.optimizers.stepping import OPTIMIZER_STEPS
from gradserve_testing import LocalServer
from tests.servers.polling import eventually


def functions(table: KernelTable[Any]) -> set[str]:
    """Returns the functions of a table's kernels, "module.function"."""
    return {each.function for each in table.declared.values()}


SUMS = {*functions(REDUCTION), "sharing.attend"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, _compiled_kernels: None) -> list[str]:
    """The kernels that servers of this process have compiled, "module.function": it behaves as if it had none.

    Then it loads them, as if they had been compiled.
    """
    kernels: list[str] = []

    def record(_compiler: KernelCompiler, kernel: Mapping[str, Any]) -> bool:
        kernels.append(f"{kernel['module'].rpartition('.')[2]}.{kernel['function']}")
        return True

    monkeypatch.setattr(KernelCompiler, "compile", record)
    monkeypatch.setattr(jit, "misses_cache", lambda *_arguments, **_options: True)
    return kernels


def test_a_server_compiles_what_is_called_and_no_more(compiled: list[str]) -> None:
    config = ServerConfig(runtime=RuntimeConfig(device="cpu", warm_up=True))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        eventually(lambda: client.server_info().ops_prepared)
        assert sorted(compiled) == sorted(SUMS), "of float32 alone"

        compiled.clear()
        x, scale = np.ones((4, 8), np.float32), np.ones(8, np.float32)
        before = client.raw_ops.LayerNorm(x=x, scale=scale, offset=scale)
        eventually(lambda: client.server_info().ops_prepared)
        assert set(compiled) - {"sharing.attend"} == functions(LAYER_NORM)
        assert len(compiled) == 1 + len(LAYER_NORM.declared), "of float32 alone"
        np.testing.assert_allclose(client.raw_ops.LayerNorm(x=x, scale=scale, offset=scale).y, before.y, rtol=1e-6)


def test_a_server_that_is_told_so_compiles_everything(compiled: list[str]) -> None:
    config = ServerConfig(runtime=RuntimeConfig(device="cpu", warm_up_ops=True))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        eventually(lambda: client.server_info().ops_prepared)
        assert {*SUMS, *functions(LAYER_NORM), *functions(OPTIMIZER_STEPS), *functions(IN_FLOAT64)} < set(compiled)


def test_an_idle_server_without_a_warm_up_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    with ServerProcess(tmp_path, "--warm-up", "false") as server, gradserve.connect(server.address) as client:
        assert not client.server_info().ops_prepared
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "llvmlite" not in maps
    assert not (tmp_path / "cache").exists()


def test_kernels_that_can_be_kept_nowhere_are_not_compiled_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserve_server.devices.host.jit.cache_folder", lambda: None)
    result = CliRunner().invoke(cli, ["kernels", "compile"])
    assert result.exit_code == 1
    assert "kernels can be kept nowhere; name a folder that can be written in NUMBA_CACHE_DIR" in result.output


def test_the_folder_of_the_cpu_s_kernels_has_another_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["kernels", "compile", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "--output needs --architectures: the folder of the CPU's kernels is NUMBA_CACHE_DIR" in result.output
