"""Runs a suite: `python -m tests [--suite short|rest|all|long] [--part K/N] [arguments of pytest]`.

The short suite has what a change can break, and nothing that depends on the speed of the machine. The rest has what is
exhaustive and, last and one at a time, what depends on time; with --part, one part of it. In neither are tests that
take many minutes each.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_NO_TESTS = 5
"""Pytest's exit status if no test was selected."""


def main(arguments: Sequence[str]) -> int:
    """Runs a suite; returns 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False)
    parser.add_argument("--suite", choices=("short", "rest", "all", "long"), default="short")
    parser.add_argument("--part", metavar="K/N", help="of the rest, only the Kth of N parts")
    chosen, others = parser.parse_known_args(arguments)
    of_rest = () if chosen.part is None else ("--part", chosen.part)
    # A shell lets its background jobs ignore SIGINT, and so would every program that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _compile_kernels()
    if chosen.suite == "long":
        return _pytest("--suite", "long", f"-n{os.cpu_count() or 1}", *others)
    statuses = []
    for suite in ("short", "rest") if chosen.suite == "all" else (chosen.suite,):
        print(f"The {suite} suite" if suite == "short" else "The rest: exhaustive tests", flush=True)
        part = of_rest if suite == "rest" else ()
        workers = f"-n{max(4, os.cpu_count() or 1)}"
        statuses.append(_pytest("--suite", suite, *part, workers, "-m", "not timing", *others))
    if chosen.suite != "short":
        print("Tests that depend on time, one at a time", flush=True)
        statuses.append(_pytest("--suite", "rest", *of_rest, "-n0", "-m", "timing", *others))
    return max([status for status in statuses if status != _NO_TESTS] or [_NO_TESTS])


def _compile_kernels() -> None:
    """Compiles the kernels of the CPU into their cache: inside a test this would count against the test's time."""
    print("Compiling kernels, unless they are in the cache", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as notes:
        compile_them = [sys.executable, "-m", "tests.servers.kernels", notes]
        processes = [subprocess.Popen(compile_them) for _ in range(os.cpu_count() or 1)]
        statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit("the kernels were not compiled")
    print(f"Kernels ready after {time.monotonic() - start:.0f} s", flush=True)


def _pytest(*arguments: str) -> int:
    environment = {"GRPC_VERBOSITY": "NONE", **os.environ}  # its core would write into the line that shows progress
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
