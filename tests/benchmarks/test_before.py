"""gradserve beside an earlier commit of itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases.rounds import comparisons, small_comparisons
from benchmarks.harness.before import against_before, beside_before, check_out
from benchmarks.harness.environments import ROOT

PACKAGES = ("gradserve", "gradserve_server")


def test_an_earlier_commit_runs_with_its_own_packages(tmp_path: Path) -> None:
    check_out("HEAD", tmp_path)
    (comparison, *_) = against_before(comparisons()[0], tmp_path)
    now, before = comparison.contestants
    assert (now.worker, now.server, now.options) == (before.worker, before.server, before.options)
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import gradserve, gradserve_server; print(gradserve.__file__, gradserve_server.__file__)",
        ],
        env={"PYTHONPATH": before.variables["PYTHONPATH"]},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(tmp_path in Path(file).parents for file in found.stdout.split())


def test_only_gradserve_is_compared_with_itself(tmp_path: Path) -> None:
    assert [each.contestants[0].label for each in against_before(comparisons()[0], tmp_path)] == [
        "gradserve, shared memory, client.empty",
        "gradserve, shared memory, ordinary arrays",
        "gradserve, bulk socket",
        "gradserve, gRPC streams",
    ]


def test_an_earlier_commit_is_one_more_peer_of_each_way(tmp_path: Path) -> None:
    (small,) = small_comparisons()
    both = beside_before(small, tmp_path)
    ways = [each.label for each in small.contestants[: small.num_own]]
    peers = [each.label for each in small.contestants[small.num_own :]]
    assert [each.label for each in both.contestants] == [*ways, *peers, *(f"before: {way}" for way in ways)]
    assert [(each.labels, each.own) for each in both.targets[len(small.targets) :]] == [
        ((f"before: {way}",), way) for way in ways
    ]
    assert all(str(tmp_path) in each.variables["PYTHONPATH"] for each in both.contestants[-len(ways) :])


def test_a_commit_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such-commit"):
        check_out("no-such-commit", tmp_path)
