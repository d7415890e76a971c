"""Runs many simulated worlds of several servers: python -m tests.simulation.sharding --seeds N."""

import argparse
import sys
from collections import Counter

from tests.simulation.sharding.parameters import ParametersWorld
from tests.simulation.sharding.world import FailedSeedError, World


def main() -> int:
    """Returns the status of the process."""
    parser = argparse.ArgumentParser(description="Runs clusters of simulated servers, which crash, over a bad network.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--parameters", action="store_true", help="of parameters rather than accumulators")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    arguments = parser.parse_args()
    faults: Counter[str] = Counter()
    failed = num_averages = num_rounds = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        world = (ParametersWorld if arguments.parameters else World)(seed)
        try:
            world.run()
        except FailedSeedError as error:
            failed += 1
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()
        if arguments.trace:
            sys.stdout.write("".join(f"{line}\n" for line in world.trace))
        faults.update(world.faults)
        num_averages += world.truth.num_averages
        num_rounds += world.truth.num_rounds
    sys.stdout.write(f"{arguments.seeds} worlds, {num_rounds} rounds, {num_averages} averages; {failed} failed\n")
    sys.stdout.write("".join(f"{count:9} {fault}\n" for fault, count in sorted(faults.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
