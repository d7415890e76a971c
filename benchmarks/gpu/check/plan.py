"""The parts of the check, the most telling first."""

from __future__ import annotations

import sys

from benchmarks.gpu import accumulators, copies
from benchmarks.gpu.check import all_tests, claims, kernels
from benchmarks.gpu.check.part import Part

_PYTEST = (sys.executable, "-m", "pytest", "--suite", "all", "--each-case", "-m", "cuda")

PARTS = (
    Part(
        "numerics",
        (*_PYTEST, "-n", "0", "-p", "benchmarks.gpu.check.recorder", *claims.tests()),
        seconds=150,
        claims=[claim.text for claim in claims.CLAIMS],
    ),
    Part(
        "accumulators",
        (sys.executable, "-m", "benchmarks.gpu.accumulators"),
        seconds=50,
        claims=accumulators.CLAIMS,
    ),
    Part("copies", (sys.executable, "-m", "benchmarks.gpu.copies"), seconds=40, claims=copies.CLAIMS),
    Part(
        "batch_norm",
        (sys.executable, "-m", "benchmarks.gpu.check.kernels", "batch_norm"),
        seconds=80,
        claims=kernels.CLAIMS["batch_norm"],
    ),
    Part(
        "rnn",
        (sys.executable, "-m", "benchmarks.gpu.check.kernels", "rnn"),
        seconds=70,
        claims=kernels.CLAIMS["rnn"],
    ),
    Part("tests", (*_PYTEST, "-p", "benchmarks.gpu.check.all_tests", "tests"), seconds=140, claims=(all_tests.CLAIM,)),
)
"""Each but the last has its own time, together less than the nine minutes; the last has what is left."""
