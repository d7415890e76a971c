"""`python -m benchmarks.gpu.check.kernels NAME`: verdicts on kernels beside cuDNN's, as PyTorch calls them."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import batch_norm, rnn
from benchmarks.gpu.check.verdict import Status, Verdict, judged, tell
from benchmarks.harness.environments import ROOT

_BN_SPEED = "batch normalization is as fast as cuDNN, over all sizes (geometric mean)"
_BN_WORST = "batch normalization is never much slower than cuDNN"
_BN_BANDWIDTH = "batch normalization reaches the bandwidth of a copy, over all sizes (median)"
_RNN_SPEED = "CudnnRNN takes no longer than the same network in PyTorch, over all sizes (geometric mean)"
_RNN_WORST = "CudnnRNN never takes much longer than PyTorch"

CLAIMS = {"batch_norm": (_BN_SPEED, _BN_WORST, _BN_BANDWIDTH), "rnn": (_RNN_SPEED, _RNN_WORST)}
_WORST = 0.8

Result = Mapping[str, Any]


def of_batch_norm(results: Sequence[Result]) -> list[Verdict]:
    """Returns the verdicts on the results of `benchmarks.gpu.batch_norm`."""
    speeds = [result["speed"] for result in results if result["speed"] is not None]
    bandwidths = [result["bandwidth_fraction"] for result in results]
    part = "batch_norm"
    return [
        *_speeds(part, speeds, batch_norm.TARGET_SPEED, (_BN_SPEED, _BN_WORST)),
        judged(part, _BN_BANDWIDTH, statistics.median(bandwidths), batch_norm.TARGET_BANDWIDTH, "x"),
    ]


def of_rnn(results: Sequence[Result]) -> list[Verdict]:
    """Returns the verdicts on the results of `benchmarks.gpu.rnn`."""
    speeds = [1 / result["ratio"] for result in results]
    return _speeds("rnn", speeds, 1 / rnn.TARGET_RATIO, (_RNN_SPEED, _RNN_WORST))


def _speeds(part: str, speeds: Sequence[float], target: float, claims: tuple[str, str]) -> list[Verdict]:
    if not speeds:
        return [Verdict(part, claim, Status.SKIP, "cuDNN refused every size") for claim in claims]
    return [
        judged(part, claims[0], statistics.geometric_mean(speeds), target, "x"),
        judged(part, claims[1], min(speeds), _WORST, "x"),
    ]


_JUDGES: Mapping[str, Callable[[Sequence[Result]], list[Verdict]]] = {"batch_norm": of_batch_norm, "rnn": of_rnn}


def main(arguments: Sequence[str]) -> int:
    """Measures, and tells the verdicts; returns the exit status."""
    (name,) = arguments
    if importlib.util.find_spec("torch") is None:
        tell(Verdict(name, claim, Status.SKIP, "PyTorch is not installed") for claim in CLAIMS[name])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--json", str(path), "--repeats", "5"]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode == 0:
            tell(_JUDGES[name](json.loads(path.read_text(encoding="utf-8"))["results"]))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
