"""One run of a server, from its start to its end."""

from collections.abc import Callable

_PREFIX_LENGTH = 8


class ServerRun:
    """Makes ids that tell what another run of the server made.

    Attributes:
        incarnation: The id of the run.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        """Takes a source of ids that nothing else has."""
        self._new_id = new_id
        self.incarnation = new_id()
        self._prefix = self.incarnation[:_PREFIX_LENGTH]
        self._length = len(self._prefix) + len(self.incarnation)

    def new_id(self) -> str:
        """Returns an id that nothing else has."""
        return self._prefix + self._new_id()

    def is_of_another(self, given: str) -> bool:
        """Returns True if an id has the form of those of a server, and is not of this run."""
        return len(given) == self._length and not given.startswith(self._prefix)
