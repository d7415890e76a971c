"""What is measured of the tests themselves: which lines and branches they run."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserve_server.devices.host.kernels import KernelTable
from gradserve_server.ops.activation import cpu as activation
from gradserve_server.ops.batch_norm import cpu as batch_norm
from gradserve_server.ops.cudnn_rnn.cpu import cells as cudnn_rnn
from gradserve_server.ops.gru import cpu as gru
from gradserve_server.ops.layer_norm import cpu as layer_norm
from tests.servers.polling import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "server" / "gradserve_server"


def compiled_files() -> Iterator[Path]:
    """Yields files with what Numba compiles: functions of kernel tables, and what says so itself."""
    for module in (activation, batch_norm, cudnn_rnn, gru, layer_norm):
        for table in vars(module).values():
            if isinstance(table, KernelTable):
                for types in table.types.values():
                    for declared in table.declared.values():
                        name, _, _ = declared.function.format(**types).rpartition(".")
                        yield Path(str(module.__file__)).parent / f"{name}.py"
    for file in SERVER.rglob("*.py"):
        if "@register_jitable" in file.read_text() or "@intrinsic" in file.read_text():
            yield file


def test_what_numba_compiles_is_left_out() -> None:
    omitted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["slipcover"]["omit"]
    assert {file.relative_to(ROOT).as_posix() for file in compiled_files()} <= set(omitted)
    assert all(list(ROOT.glob(each)) for each in omitted)


PROJECT = {
    "pyproject.toml": """
[tool.pytest.ini_options]
pythonpath = ["src"]
[tool.slipcover]
fail-under = 70
source = ["src/package"]
omit = ["src/package/left_out.py"]
""",
    "src/package/__init__.py": "",
    "src/package/used.py": """
def sign(x):
    if x < 0:
        return -1
    return 1
""",
    "src/package/left_out.py": "x = 1\n",
    "conftest.py": "import package.used\n",
    "test_positive.py": "from package.used import sign\ndef test(): assert sign(1) == 1\n",
    "test_negative.py": "from package.used import sign\ndef test(): assert sign(-1) == -1\n",
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("slipcover", reason="it is in the extra dev")
    for name, content in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_PLUGINS": "tests.coverage", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_all_workers_are_added_up(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2")
    assert done.returncode == 0, done.stdout
    assert "100.00 %; the floor is 70 %" in done.stdout


def test_a_run_below_the_floor_fails(tmp_path: Path) -> None:
    """Lines and branches count: one of each was not run, and a file was never imported."""
    never = "def f(x):\n    return x\n"
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "never.py").write_text(never)
    done = run(tmp_path, "-n", "0", "test_positive.py")
    assert done.returncode == 1
    assert "50.00 % are less than the floor of 70 %" in done.stdout
