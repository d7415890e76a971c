"""The provenance of a result: hardware, versions, date and commit."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.harness.environments import ROOT


def describe() -> dict[str, Any]:
    """Returns everything that a reader needs to judge the numbers."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _first_match(Path("/proc/cpuinfo"), r"model name\s*: (.*)"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first_match(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)") or 0) / 2**20, 1),
        "load_average_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found.group(1).strip() if found else None
