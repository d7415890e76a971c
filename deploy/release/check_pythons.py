"""Installs the wheel for every Python that there is, and tries it.

Usage: python -m deploy.release.check_pythons PYTHON...
"""

import shutil
import sys

from deploy.release.environments import ROOT, newest_wheel, tried


def main(wanted: list[str]) -> int:
    """Tries interpreters by name or path; returns 1 if one of them fails, or there is none."""
    wheel, found, failed = newest_wheel(), 0, 0
    for python in wanted:
        if shutil.which(python) is None:
            print(f"{python:12} not found: not tried", flush=True)
            continue
        trial = tried(python, ROOT / "build" / "pythons" / python.replace("/", "-"), wheel)
        print(f"{python:12} {trial.said}", flush=True)
        found += 1
        failed += not trial.works
    return int(failed > 0 or not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
