"""One virtual environment per peer, made on first use and kept between runs.

The peers need other versions of NumPy and protobuf than gradserve, so none of them is installed beside it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository, in which every benchmark process runs."""
_CACHE = ROOT / ".venv-bench"
_INSTALL_SECONDS = 900.0


class NotAvailableError(Exception):
    """A peer cannot be installed here; the benchmark goes on without it."""


@dataclass(frozen=True)
class Environment:
    """A Python environment for one peer."""

    name: str
    requirements: tuple[str, ...]
    """Pinned requirements, for pip. Empty: the environment in which the benchmark itself runs."""

    def prepare(self, progress: Callable[[str], None]) -> Path:
        """Makes the environment unless it is there already, and returns its interpreter.

        Raises:
            NotAvailableError: It cannot be made; the message says why in one line.
        """
        if not self.requirements:
            return _own_interpreter()
        folder = _CACHE / self.name
        python = folder / "bin" / "python"
        stamp = folder / "requirements.txt"
        wanted = "\n".join((*self.requirements, ""))
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return python
        progress(f"installing {', '.join(self.requirements)}")
        shutil.rmtree(folder, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(folder)])
        _call([str(python), "-m", "pip", "install", "--quiet", *self.requirements])
        stamp.write_text(wanted, encoding="utf-8")
        return python


PROJECT = Environment("gradserve", ())
FLIGHT = Environment("flight", ("pyarrow==26.0.1", "numpy==2.4.6"))
GLOO = Environment("gloo", ("torch==2.13.0", "numpy==2.4.6"))
TENSORFLOW = Environment("tensorflow", ("tensorflow-cpu==2.15.1", "numpy==1.26.4"))

MALLOC_TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
}
"""Environment variables that make glibc keep freed memory instead of returning it to the system."""


def _own_interpreter() -> Path:
    for package in ("gradserve", "gradserve_server"):
        if importlib.util.find_spec(package) is None:
            raise NotAvailableError(f"{package} is not installed; try pip install -e '.[server]'")
    return Path(sys.executable)


def _call(command: list[str]) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotAvailableError(last_line) from error
    except subprocess.TimeoutExpired as error:
        raise NotAvailableError(f"not installed within {_INSTALL_SECONDS:.0f} s") from error
