"""Compares gradserve with an earlier commit of itself, to find changes that made it slower."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT, ROOT
from benchmarks.harness.verdicts import Target

_NOT_SLOWER = 0.95
"""The least speed that is not slower: two runs of the same code differ as much."""
_PACKAGES = ("client", "server")


def check_out(commit: str, folder: Path) -> None:
    """Writes the packages of a commit into a folder.

    Raises:
        ValueError: The commit does not exist.
    """
    archive = subprocess.run(["git", "archive", commit, *_PACKAGES], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise ValueError(archive.stderr.decode(errors="replace").strip())
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def against_before(comparison: Comparison, folder: Path) -> list[Comparison]:
    """Returns a comparison for each gradserve contestant of a comparison, with the packages in a folder as its peer.

    The interfaces of kernels that run without a server change with the code. If those of the earlier commit cannot be
    called, the result says so.
    """
    return [
        replace(
            comparison,
            title=f"{comparison.title}: {contestant.label}",
            contestants=(contestant, _before(contestant, folder, "before")),
            targets=(Target("before", ("before",), _NOT_SLOWER),),
            num_own=1,
        )
        for contestant in _own(comparison)
    ]


def beside_before(comparison: Comparison, folder: Path) -> Comparison:
    """Returns a comparison with one more peer for each gradserve contestant: the same with the packages in a folder."""
    own = _own(comparison)
    labels = [f"before: {each.label}" for each in own]
    return replace(
        comparison,
        contestants=(
            *comparison.contestants,
            *(_before(each, folder, label) for each, label in zip(own, labels, strict=True)),
        ),
        targets=(
            *comparison.targets,
            *(Target(label, (label,), _NOT_SLOWER, each.label) for each, label in zip(own, labels, strict=True)),
        ),
    )


def _own(comparison: Comparison) -> list[Contestant]:
    return [
        each
        for each in comparison.contestants
        if each.environment is PROJECT and each.worker.startswith("benchmarks.peers.gradserve.")
    ]


def _before(contestant: Contestant, folder: Path, label: str) -> Contestant:
    path = os.pathsep.join(str(folder / package) for package in _PACKAGES)
    return replace(contestant, label=label, variables={**contestant.variables, "PYTHONPATH": path})
