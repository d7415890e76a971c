from __future__ import annotations

import subprocess
import sys

from benchmarks.cases import CASES
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.environments import ROOT


def test_an_unknown_case_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only", "put_get,nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "unknown case nonsense" in done.stderr


def test_every_target_names_contestants() -> None:
    comparisons = [each for case in CASES.values() for each in case() if isinstance(each, Comparison)]
    assert any(comparison.targets for comparison in comparisons)
    for comparison in comparisons:
        labels = {contestant.label for contestant in comparison.contestants[1:]}
        for target in comparison.targets:
            assert labels.issuperset(target.labels)


def test_every_contestant_names_modules_that_exist() -> None:
    for case in CASES.values():
        for measurement in case():
            for contestant in measurement.contestants:
                for module in (contestant.worker, contestant.server):
                    assert module is None or (ROOT / f"{module.replace('.', '/')}.py").is_file()
