"""gradserve of an earlier commit as the contestant of what is here: has a change made anything slower?"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.comparison import Comparison, Target
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT, ROOT

_NOT_SLOWER = 0.95
"""Differences below this are what two runs of the same code have, too."""
_PACKAGES = ("client", "server")


def check_out(commit: str, folder: Path) -> None:
    """Writes the packages of a commit into a folder.

    Raises:
        ValueError: There is no such commit.
    """
    archive = subprocess.run(["git", "archive", commit, *_PACKAGES], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise ValueError(archive.stderr.decode(errors="replace").strip())
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def against_before(comparison: Comparison, folder: Path) -> list[Comparison]:
    """Returns a comparison for each contestant of a comparison that is gradserve: with its packages in a folder.

    Kernels that are run without a server are called in ways that change with the code; where those of the earlier
    commit cannot be called, the result says so.
    """
    return [
        Comparison(
            title=f"{comparison.title}: {contestant.label}",
            contestants=(contestant, _before(contestant, folder)),
            num_bytes=comparison.num_bytes,
            steps=comparison.steps,
            targets=(Target("before", ("before",), _NOT_SLOWER),),
        )
        for contestant in comparison.contestants
        if contestant.environment is PROJECT and contestant.worker.startswith("benchmarks.peers.gradserve.")
    ]


def _before(contestant: Contestant, folder: Path) -> Contestant:
    path = os.pathsep.join(str(folder / package) for package in _PACKAGES)
    return replace(contestant, label="before", variables={**contestant.variables, "PYTHONPATH": path})
