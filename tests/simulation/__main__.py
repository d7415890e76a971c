"""Runs many simulated worlds: python -m tests.simulation --seeds N."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from string import ascii_uppercase

from tests.simulation.server import STATES
from tests.simulation.world import FailedSeedError, World


def main() -> int:
    """Returns the status of the process."""
    parser = argparse.ArgumentParser(description="Runs servers on simulated disks, and crashes them.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    arguments = parser.parse_args()
    faults: Counter[tuple[str, str]] = Counter()
    gradients = failed = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        world = World(seed)
        try:
            world.run()
        except FailedSeedError as error:
            failed += 1
            sys.stdout.write(f"{error}\n")
        if arguments.trace:
            sys.stdout.write("".join(f"{line}\n" for line in world.trace))
        faults.update(world.faults)
        gradients += world.num_gradients
    sys.stdout.write(f"{arguments.seeds} worlds, {gradients} gradients, {faults.total()} faults; {failed} failed\n")
    sys.stdout.write("".join(f"{line}\n" for line in _table(faults)))
    return 1 if failed else 0


def _table(faults: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yields the lines of a table: how often each fault hit each state of a server."""
    names = sorted({fault for fault, _ in faults})
    seen = sum((name, state) in faults for name in names for state in STATES)
    yield f"{seen} of {len(names) * len(STATES)} pairs of a fault and a state of the server:"
    for letter, state in zip(ascii_uppercase, STATES, strict=False):
        yield f"  {letter}: {state}"
    yield f"{'':44}" + "".join(f"{letter:>8}" for letter in ascii_uppercase[: len(STATES)])
    for name in names:
        yield f"{name:44}" + "".join(f"{faults[name, state]:8}" for state in STATES)


if __name__ == "__main__":
    sys.exit(main())
