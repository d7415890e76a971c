"""Fuzzes one target with atheris, which looks for inputs that reach more code: NAME, SECONDS, flags of libFuzzer."""

import os
import random
import sys
import time

import atheris

with atheris.instrument_imports(include=["gradserve", "gradserve_server"]):
    from tests.fuzz.targets.table import TARGETS


def main() -> None:
    """Runs until the time is over, or an input is handled wrongly; then libFuzzer ends the process."""
    name, seconds, *flags = sys.argv[1:]
    num_inputs = 0
    with TARGETS[name]() as target:
        end = time.monotonic() + float(seconds)

        def run(data: bytes) -> None:
            nonlocal num_inputs
            if time.monotonic() >= end:
                sys.stdout.write(f"{name}: {num_inputs} inputs\n")
                sys.stdout.flush()
                os._exit(0)  # libFuzzer's own end takes the threads of a server for a crash
            target.run(data)
            num_inputs += 1

        def mutated(data: bytes, max_size: int, seed: int) -> bytes:
            chance = random.Random(seed)
            if chance.random() < 0.2:
                return bytes(atheris.Mutate(data, max_size))
            return target.mutated(data, chance)[:max_size]

        atheris.Setup([sys.argv[0], *flags], run, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
