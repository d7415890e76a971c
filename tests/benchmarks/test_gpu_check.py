"""The check on a GPU: its parts, their time, its verdicts and its report. What it measures needs a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu.check import __main__ as check
from benchmarks.gpu.check import kernels, recorder
from benchmarks.gpu.check.claims import CLAIMS, MOST_TESTS, Claim
from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.check.part import Part, Ran, run_part
from benchmarks.gpu.check.plan import PARTS
from benchmarks.gpu.check.verdict import Status, Verdict, judged
from benchmarks.harness.environments import ROOT
from tests.servers.polling import PATIENCE_SECONDS, eventually, growing_limits
from tests.servers.processes import has_ended

MACHINE = Machine("NVIDIA Example", 1, 80.0, "9.0", 13000, "14.2.0", 91000, None)

TELLING = """
import time
from benchmarks.gpu.check.verdict import Status, Verdict, tell
tell([Verdict("part", "first", Status.PASS, "1.00x")])
{then}
tell([Verdict("part", "second", Status.{status})])
"""


def part(then: str = "", status: str = "PASS", seconds: float = 60) -> Part:
    command = (sys.executable, "-c", TELLING.format(then=then, status=status))
    return Part("part", command, seconds, claims=("first", "second"))


FIRST = Verdict("part", "first", Status.PASS, "1.00x")


def test_the_verdicts_of_a_part() -> None:
    ran = run_part(part(), 60)
    assert ran.verdicts == [FIRST, Verdict("part", "second", Status.PASS)]
    assert ran.output == []


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("raise SystemExit(7)", "it ended with status 7"),
        ("raise SystemExit(0)", "it ended without a verdict"),
    ],
    ids=["broken", "silent"],
)
def test_what_a_part_has_not_judged_is_reported(then: str, why: str) -> None:
    ran = run_part(part(f"print('a last word', flush=True); {then}"), PATIENCE_SECONDS)
    assert ran.verdicts == [FIRST, Verdict("part", "second", Status.NOT_RUN, why)]
    assert ran.output == ([] if "without" in why else ["a last word"])


def test_what_a_part_has_not_judged_in_time_is_reported() -> None:
    for limit in growing_limits():
        ran = run_part(part("print('a last word', flush=True); time.sleep(600)"), limit)
        if ran.output:
            break
    assert ran.verdicts == [FIRST, Verdict("part", "second", Status.NOT_RUN, f"its {limit:.0f} s were over")]
    assert ran.output == ["a last word"]


def test_a_part_goes_on_in_another_process_where_cuda_has_failed_for_good() -> None:
    script = """
import os
from pathlib import Path
from benchmarks.gpu.check.part import GO_ON
from benchmarks.gpu.check.verdict import Status, Verdict, read_report, tell
told = len(read_report(Path(os.environ["CHECK_GPU_REPORT"])))
if told < 3:
    tell([Verdict("part", f"claim {told}", Status.FAIL)])
raise SystemExit(GO_ON)
"""
    ran = run_part(Part("part", (sys.executable, "-c", script), 60, [f"claim {number}" for number in range(4)]), 60)
    assert [(each.claim, each.status) for each in ran.verdicts] == [
        *[(f"claim {number}", Status.FAIL) for number in range(3)],
        ("claim 3", Status.NOT_RUN),
    ]


def test_a_part_that_fails_after_all_its_verdicts_is_reported() -> None:
    broken = Part("part", (sys.executable, "-c", "raise SystemExit(3)"), 60)
    assert run_part(broken, 60).verdicts == [
        Verdict("part", "all of it is run", Status.NOT_RUN, "it ended with status 3")
    ]


def test_a_part_takes_the_processes_that_it_has_started_along(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    inner = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    for limit in growing_limits():
        run_part(Part("part", (sys.executable, "-c", program), 60), limit)
        if told.exists() and told.read_text():
            break
    try:
        left = psutil.Process(int(told.read_text()))
    except psutil.NoSuchProcess:
        return
    eventually(lambda: has_ended(left))


def test_the_last_part_has_what_is_left() -> None:
    now, given = 0.0, []

    def run(each: Part, seconds: float) -> Ran:
        nonlocal now
        given.append((each.name, seconds))
        now += 30
        return Ran([], 30, [])

    parts = [Part(name, (), seconds) for name, seconds in (("a", 50), ("b", 100), ("c", 10), ("d", 10))]
    check.run_all(parts, 95, lambda _: None, clock=lambda: now, run=run)
    assert given == [("a", 50), ("b", 65), ("c", 10), ("d", 5)]


def test_the_parts_fit_into_nine_minutes() -> None:
    assert sum(each.seconds for each in PARTS) <= 60 * check.MINUTES
    assert len({each.name for each in PARTS}) == len(PARTS)
    claims = [claim for each in PARTS for claim in each.claims]
    assert len(set(claims)) == len(claims)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "look_around", lambda: MACHINE)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("status", "exit_status"), [("PASS", 0), ("SKIP", 0), ("FAIL", 1), ("NOT_RUN", 1)])
def test_the_report(
    status: str,
    exit_status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "PARTS", (part(status=status),))
    path = tmp_path / "result.json"
    assert check.main(["--json", str(path)]) == exit_status
    result = json.loads(path.read_text())
    assert result["provenance"]["device"] == "NVIDIA Example"
    assert [each["claim"] for each in result["verdicts"]] == ["first", "second"]
    printed = capsys.readouterr().out
    assert "PASS     part          first: 1.00x\n" in printed
    assert f"written to {path}" in printed


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 2
    assert capsys.readouterr().err == ("no GPU to check: CuPy is not installed: see the extras cuda12 and cuda13\n")


# What judges


def test_figures_reach_their_targets_or_fail() -> None:
    assert judged("part", "claim", 0.8, 0.8, "x") == Verdict("part", "claim", Status.PASS, "0.80x, at least 0.80x")
    assert judged("part", "claim", 0.79, 0.8, "x").status is Status.FAIL


def test_kernels_beside_cudnn() -> None:
    results: list[Any] = [{"speed": speed, "bandwidth_fraction": 0.9} for speed in (1.2, 1.1, None, 0.7)]
    mean, worst, bandwidth = kernels.of_batch_norm(results)
    assert (mean.status, mean.figure) == (Status.FAIL, "0.97x, at least 1.00x")
    assert (worst.status, worst.figure) == (Status.FAIL, "0.70x, at least 0.80x")
    assert bandwidth.status is Status.PASS
    assert [each.status for each in kernels.of_rnn([{"ratio": 1.0}, {"ratio": 1.04}])] == [Status.PASS] * 2
    assert {each.status for each in kernels.of_batch_norm([{"speed": None, "bandwidth_fraction": 0.9}])} == {
        Status.SKIP,
        Status.PASS,
    }


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_kernels_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["rnn"]) == 0
    assert capsys.readouterr().out.count("SKIP     rnn ") == len(kernels.CLAIMS["rnn"])


def test_every_claim_has_tests() -> None:
    """And no more of them are run than say something new."""
    done = subprocess.run(
        [sys.executable, "-m", *PARTS[0].command[2:], "--collect-only"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = [line for line in done.stdout.splitlines() if "::" in line]
    for claim in CLAIMS:
        assert any(claim.has(line) for line in found), claim.text
    assert len(found) <= MOST_TESTS * len(CLAIMS)


def test_a_test_that_has_spoilt_cuda_ends_its_claims_and_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "why_lost", lambda: "cudaErrorIllegalAddress")
    judge = recorder.Recorder()
    judge._waiting = {Claim("it holds", ("t",)): ["t::0", "t::1"], Claim("another", ("u",)): ["u::0"]}
    judge.pytest_runtest_logreport(Report("t::0", *FAILED[0]))  # type: ignore[arg-type]
    with pytest.raises(pytest.exit.Exception, match="cannot use the GPU any more: cudaErrorIllegalAddress"):
        judge.pytest_runtest_logreport(Report("t::0", *FAILED[1]))  # type: ignore[arg-type]
    assert capsys.readouterr().out.startswith("FAIL     numerics      it holds: 1 of 1 tests failed")


class Report:
    def __init__(self, nodeid: str, when: str, outcome: str, longrepr: Any = "") -> None:
        self.nodeid, self.when, self.outcome, self.longrepr = nodeid, when, outcome, longrepr
        self.failed, self.skipped = outcome == "failed", outcome == "skipped"
        self.longreprtext = str(longrepr)


PASSED = [("call", "passed", ""), ("teardown", "passed", "")]
FAILED = [("call", "failed", "def f():\nE   AssertionError: 2 is not 1\nE   more"), ("teardown", "passed", "")]
SKIPPED = [("setup", "skipped", ("file", 1, "Skipped: needs two GPUs")), ("teardown", "passed", "")]


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([PASSED, PASSED], (Status.PASS, "2 tests")),
        ([PASSED, SKIPPED], (Status.PASS, "1 tests")),
        ([SKIPPED, SKIPPED], (Status.SKIP, "needs two GPUs")),
        ([PASSED, FAILED], (Status.FAIL, "1 of 2 tests failed; t::1: AssertionError: 2 is not 1")),
        ([PASSED], None),
    ],
    ids=["passed", "one skipped", "skipped", "one failed", "under way"],
)
def test_a_claim_is_judged_once_all_its_tests_are_done(
    outcomes: list[Any], verdict: tuple[Status, str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = recorder.Recorder()
    judge._waiting = {Claim("it holds", ("t",)): ["t::0", "t::1"]}
    for index, reports in enumerate(outcomes):
        for report in reports:
            judge.pytest_runtest_logreport(Report(f"t::{index}", *report))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert printed == ("" if verdict is None else f"{Verdict(recorder.PART, 'it holds', *verdict)}\n")
