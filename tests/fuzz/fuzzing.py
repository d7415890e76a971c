"""Gives a target inputs: its corpus, what was found earlier, and mutations."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.targets.target import Found, Target

FOUND = Path(__file__).parent / "corpus" / "found"
"""Inputs that were found to be handled wrongly, and have been handled rightly since: a folder for each target."""
_CHECK_EVERY = 2000


@dataclass
class Outcome:
    """What fuzzing came to.

    Attributes:
        num_inputs: The number of inputs.
        found: What was found, by its message, with the first input that led to it.
    """

    num_inputs: int = 0
    found: dict[str, bytes] = field(default_factory=dict)


def found_before(name: str) -> list[bytes]:
    """Returns the inputs that were found earlier for a target."""
    folder = FOUND / name
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def fuzz(
    name: str, target: Target, seed: int, *, num_inputs: int | None = None, seconds: float | None = None
) -> Outcome:
    """Gives a target its corpus, what was found earlier, and so many mutations, or mutations for so long."""
    outcome = Outcome()
    end = None if seconds is None else time.monotonic() + seconds
    for data in _inputs(name, target, seed, num_inputs):
        if end is not None and time.monotonic() > end:
            break
        outcome.num_inputs += 1
        try:
            target.run(data)
            if outcome.num_inputs % _CHECK_EVERY == 0:
                target.check()
        except Found as found:
            outcome.found.setdefault(str(found).splitlines()[-1][:200], data)
    try:
        target.check()
    except Found as found:
        outcome.found[str(found)] = b""
    return outcome


def _inputs(name: str, target: Target, seed: int, num_inputs: int | None) -> Iterator[bytes]:
    chance = random.Random(f"{name} {seed}")
    corpus = target.corpus + found_before(name)
    yield from corpus
    count = 0
    while num_inputs is None or count < num_inputs:
        count += 1
        data = chance.choice(corpus)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            data = target.mutated(data, chance)
        yield data
