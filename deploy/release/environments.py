"""Environments in which a wheel is installed and tried."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
TESTING = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
"""The packages that the suite needs beside those of the server."""
_SECONDS = 1800


@dataclass(frozen=True)
class Trial:
    """The outcome of trying a wheel in an environment.

    Attributes:
        python: The interpreter, as it was asked for.
        said: The last line that was printed.
        works: Whether it works.
    """

    python: str
    said: str
    works: bool


def newest_wheel() -> Path:
    """Returns the wheel in dist/, which `make dist` builds."""
    return max((ROOT / "dist").glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def tried(python: str, folder: Path, wheel: Path, *constraints: Path, tests: Sequence[str] = ()) -> Trial:
    """Installs the client in a new environment and tries it there, then the server.

    Args:
        python: The interpreter: a name on PATH, or a path.
        folder: Where to make the environment; removed if it works.
        wheel: The wheel.
        constraints: Files with the versions to install.
        tests: Paths of tests that the installed server has to pass as well.
    """
    shutil.rmtree(folder, ignore_errors=True)
    own = folder / "bin" / "python"
    limits = [option for file in constraints for option in ("-c", str(file))]
    pip = [str(own), "-m", "pip", "--disable-pip-version-check"]
    commands = [
        [python, "-m", "venv", str(folder)],
        [*pip, "install", "--quiet", *limits, str(wheel)],
        [*pip, "check"],
        [str(own), "-c", "import gradserve, gradserve.aio, gradserve.training"],
        [*pip, "install", "--quiet", *limits, f"{wheel}[server]"],
        [*pip, "check"],
        [str(own), str(SMOKE)],
    ]
    # Warnings are for the versions that the suite is written for.
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    testing = [str(own), "-m", "pytest", *options, *tests]
    if tests:
        # Before the last one, which says what was tried.
        commands[-1:-1] = [[*pip, "install", "--quiet", *limits, *TESTING], testing]
    for command in commands:
        where = ROOT if command is testing else Path("/")
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            return Trial(python, f"{' '.join(command[1:4])}: {lines[-1] if lines else done.returncode}", works=False)
    shutil.rmtree(folder)
    return Trial(python, done.stdout.strip().splitlines()[-1], works=True)
