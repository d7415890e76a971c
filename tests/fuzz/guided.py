"""Fuzzes one target with atheris, which chooses inputs that reach more of the code: NAME, and flags of libFuzzer."""

import random
import sys

import atheris

with atheris.instrument_imports(include=["gradserve", "gradserve_server"]):
    from tests.fuzz.targets.table import TARGETS


def main() -> None:
    """Runs until libFuzzer ends the process."""
    name, *flags = sys.argv[1:]
    with TARGETS[name]() as target:

        def mutated(data: bytes, max_size: int, seed: int) -> bytes:
            chance = random.Random(seed)
            if chance.random() < 0.2:
                return bytes(atheris.Mutate(data, max_size))
            return target.mutated(data, chance)[:max_size]

        atheris.Setup([sys.argv[0], *flags], target.run, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
