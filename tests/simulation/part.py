"""The interface of a part of a simulated world."""

import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol


class Part(Protocol):
    """Things of a server that belong together, the clients that use them, and what has to hold of them.

    Attributes:
        name: Its name.
        things: What there may be in the middle of a fault, in any combination.
    """

    name: str
    things: tuple[str, ...]

    @property
    def clients(self) -> Sequence[str]:
        """The names of its clients on the network."""
        ...

    def present(self) -> Collection[str]:
        """Returns which of its things are there now."""
        ...

    def recovered(self) -> None:
        """Looks at what a server has found at its start. Raises if that breaks a promise."""
        ...

    def workers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Returns what clients do; begun with each server, and cancelled with it."""
        ...

    def observe(self, is_quiet: bool) -> None:
        """Looks at everything that anybody could see now. Raises if that breaks a promise.

        Args:
            is_quiet: Whether nothing else is left to do at this time.
        """
        ...

    async def finish(self) -> None:
        """Ends what the clients have left, checks it, and deletes everything."""
        ...


def states_of(things: Sequence[str]) -> list[str]:
    """Returns the names of all combinations of things."""
    subsets = itertools.product((False, True), repeat=len(things))
    return [state_of(list(itertools.compress(things, subset))) for subset in subsets]


def state_of(present: Collection[str]) -> str:
    """Returns the name of a combination of things."""
    return " and ".join(present) or "quiet"
