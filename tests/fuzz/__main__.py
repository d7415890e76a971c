"""Fuzzes all targets for some minutes; guided by coverage if atheris is installed. `make fuzz MINUTES=10`."""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.fuzzing import FOUND, found_before, fuzz
from tests.fuzz.targets.table import TARGETS


def main() -> int:
    """Returns the number of targets in which something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", choices=TARGETS, action="append", help="by default all of them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    seconds = arguments.minutes * 60 / len(names)
    has_atheris = importlib.util.find_spec("atheris") is not None
    failed = 0
    for name in names:
        failed += _guided(name, seconds, arguments.seed) if has_atheris else _random(name, seconds, arguments.seed)
    return failed


def _random(name: str, seconds: float, seed: int) -> bool:
    with TARGETS[name]() as target:
        outcome = fuzz(name, target, seed, seconds=seconds)
    sys.stdout.write(f"{name}: {outcome.num_inputs} inputs, {len(outcome.found)} faults\n")
    for number, (message, data) in enumerate(outcome.found.items()):
        sys.stdout.write(f"  {message}\n  {data[:200]!r}\n")
        if data:
            (FOUND / name).mkdir(parents=True, exist_ok=True)
            (FOUND / name / f"{seed}-{number}").write_bytes(data)
    return bool(outcome.found)


def _guided(name: str, seconds: float, seed: int) -> bool:
    """Runs atheris in a process of its own, which ends at the first input that is handled wrongly, and keeps it."""
    with tempfile.TemporaryDirectory() as folder:
        corpus, found = Path(folder) / "corpus", Path(folder) / "found"
        corpus.mkdir()
        found.mkdir()
        for number, data in enumerate(TARGETS[name]().corpus + found_before(name)):
            (corpus / str(number)).write_bytes(data)
        flags = [f"-seed={seed + 1}", f"-artifact_prefix={found}/", "-timeout=60"]
        limits = ["-rss_limit_mb=4096", "-max_len=20000"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.guided", name, f"{seconds:.0f}", *flags, *limits, str(corpus)],
            check=False,
        )
        for path in found.iterdir():
            (FOUND / name).mkdir(parents=True, exist_ok=True)
            (FOUND / name / path.name[:20]).write_bytes(path.read_bytes())
    sys.stdout.write(f"{name}: {'a fault' if done.returncode else 'nothing'} found in {seconds:.0f} s\n")
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
