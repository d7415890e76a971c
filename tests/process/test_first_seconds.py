"""What a server compiles: the kernels of sums at its start, those of an op when it is called, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve.testing import ServerProcess
from gradserve_server.commands.cli import cli
from gradserve_server.devices.host.reduction import REDUCTION
from gradserve_server.ops.layer_norm.cpu import LAYER_NORM
from tests.servers.polling import eventually


def functions(table: object) -> set[str]:
    """Returns the functions of a table's kernels, "module.function"."""
    return {each.function for each in table.declared.values()}  # type: ignore[attr-defined]


SUMS = {*functions(REDUCTION), "sharing.attend"}


class Cache:
    """A folder for compiled kernels, which is empty at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def kernels(self) -> set[str]:
        """Returns the functions that were compiled, "module.function"."""
        return {".".join(each.name.split("-")[0].rsplit(".", 2)[-2:]) for each in self.folder.rglob("*.nbi")}

    def num_variants(self) -> int:
        """Returns the number of compiled kernels, one for each function and dtype."""
        return len(list(self.folder.rglob("*.nbc")))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    folder = tmp_path / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    return Cache(folder)


@pytest.fixture
def server(tmp_path: Path, cache: Cache) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, "--warm-up", "true") as server:
        yield server


def test_a_server_compiles_what_is_called_and_no_more(server: ServerProcess, cache: Cache) -> None:
    with gradserve.connect(server.address) as client:
        eventually(lambda: client.server_info().ops_prepared)
        assert cache.kernels() == SUMS
        assert cache.num_variants() == len(SUMS), "of float32 alone"

        x, scale = np.ones((4, 8), np.float32), np.ones(8, np.float32)
        before = client.raw_ops.LayerNorm(x=x, scale=scale, offset=scale)
        eventually(lambda: client.server_info().ops_prepared)
        assert cache.kernels() == SUMS | functions(LAYER_NORM)
        assert cache.num_variants() == len(SUMS) + len(LAYER_NORM.declared)
        np.testing.assert_allclose(client.raw_ops.LayerNorm(x=x, scale=scale, offset=scale).y, before.y, rtol=1e-6)
    assert server.log.count("kernels prepared") == 2


def test_an_idle_server_without_a_warm_up_compiles_nothing(tmp_path: Path, cache: Cache) -> None:
    with ServerProcess(tmp_path, "--warm-up", "false") as server, gradserve.connect(server.address) as client:
        assert not client.server_info().ops_prepared
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "llvmlite" not in maps
    assert cache.kernels() == set()


def test_kernels_that_can_be_kept_nowhere_are_not_compiled_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserve_server.devices.host.jit.cache_folder", lambda: None)
    result = CliRunner().invoke(cli, ["kernels", "compile"])
    assert result.exit_code == 1
    assert "kernels can be kept nowhere; name a folder that can be written in NUMBA_CACHE_DIR" in result.output


def test_the_folder_of_the_cpu_s_kernels_has_another_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["kernels", "compile", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "--output needs --architectures: the folder of the CPU's kernels is NUMBA_CACHE_DIR" in result.output
