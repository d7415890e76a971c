"""Runs many simulated worlds: python -m tests.simulation --seeds N."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from string import ascii_uppercase

from tests.simulation.part import states_of
from tests.simulation.world import FailedSeedError, World


def main() -> int:
    """Returns the status of the process."""
    parser = argparse.ArgumentParser(description="Runs servers on simulated disks, and crashes them.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    arguments = parser.parse_args()
    faults: Counter[tuple[str, str, str]] = Counter()
    things: dict[str, Sequence[str]] = {}
    num_faults = failed = 0
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
        num_faults += world.num_faults
        things.update({part.name: part.things for part in world.parts})
    sys.stdout.write(f"{arguments.seeds} worlds, {num_faults} faults; {failed} failed\n")
    for part, of_part in things.items():
        sys.stdout.write("".join(f"{line}\n" for line in _table(faults, part, states_of(of_part))))
    return 1 if failed else 0


def _table(faults: Counter[tuple[str, str, str]], part: str, states: Sequence[str]) -> Iterator[str]:
    """Yields the lines of a table: how often each fault hit each state of a part of the server."""
    names = sorted({fault for of_part, fault, _ in faults if of_part == part})
    seen = sum((part, name, state) in faults for name in names for state in states)
    yield f"\n{part}: {seen} of {len(names) * len(states)} pairs of a fault and a state:"
    for letter, state in zip(ascii_uppercase, states, strict=False):
        yield f"  {letter}: {state}"
    yield f"{'':44}" + "".join(f"{letter:>8}" for letter in ascii_uppercase[: len(states)])
    for name in names:
        yield f"{name:44}" + "".join(f"{faults[part, name, state]:8}" for state in states)


if __name__ == "__main__":
    sys.exit(main())
