"""Runs many simulated worlds: python -m tests.simulation --seeds N."""

import argparse
import sys
from collections import Counter

from tests.simulation.world import FailedSeedError, World


def main() -> int:
    """Returns the status of the process."""
    parser = argparse.ArgumentParser(description="Runs servers on simulated disks, and crashes them.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    arguments = parser.parse_args()
    crashes: Counter[str] = Counter()
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
        crashes.update(world.crashes)
        gradients += world.num_gradients
    lines = [f"{arguments.seeds} worlds, {gradients} gradients, {crashes.total()} crashes; {failed} failed"]
    lines += [f"{count:8} crashes at: {point}" for point, count in sorted(crashes.items())]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
