"""What can be fuzzed."""

import random
from typing import Protocol


class Found(AssertionError):  # noqa: N818  it is not an error of the program that runs
    """An input to which something reacted as it must not."""


class Target(Protocol):
    """Something that takes bytes from others, in a `with` block."""

    def __enter__(self) -> "Target": ...

    def __exit__(self, *exception: object) -> None: ...

    @property
    def corpus(self) -> list[bytes]:
        """Valid inputs."""

    def mutated(self, data: bytes, chance: random.Random) -> bytes:
        """Returns another input."""

    def run(self, data: bytes) -> None:
        """Gives it an input.

        Raises:
            Found: It did not react as it must.
        """

    def check(self) -> None:
        """Looks at what all inputs have left behind.

        Raises:
            Found: Something has grown, or does not answer any more.
        """
