"""Installs the lowest versions of everything that pyproject.toml asks for, tries them, and attacks them.

What is asked for by name has its lowest version, and what that needs in turn has the newest that fits.

Usage: python -m deploy.release.check_floors PYTHON
"""

import subprocess
import sys

from deploy.release.environments import ROOT, newest_wheel, tried

EXTRAS = ("server", "tracing")
ATTACKS = ("tests/floods", "tests/bad_input", "tests/security/test_handshakes.py")
"""The tests of limits: a library may work, and give a stranger all memory or all time."""


def main(python: str) -> int:
    """Tries the lowest versions; returns 1 if they fail."""
    floors = ROOT / "build" / "floors.txt"
    floors.parent.mkdir(exist_ok=True)
    extras = [option for extra in EXTRAS for option in ("--extra", extra)]
    command = ["uv", "pip", "compile", "pyproject.toml", *extras, "--resolution", "lowest-direct", "--python", python]
    quiet = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--output-file", str(floors)]
    subprocess.run([sys.executable, "-m", *command, *quiet], cwd=ROOT, check=True)
    print(floors.read_text(), end="")
    trial = tried(python, ROOT / "build" / "floors", newest_wheel(), floors, tests=ATTACKS)
    print(trial.said)
    return int(not trial.works)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
