"""The work of one turn of the event loop."""


class Turn:
    """Counts what is looked at before other tasks get their turn.

    Attributes:
        is_over: Whether something was left for the next turn.
    """

    __slots__ = ("_looks", "is_over")

    def __init__(self, looks: int) -> None:
        """Takes how many things may be looked at."""
        self._looks = looks
        self.is_over = False

    def look(self) -> bool:
        """Returns True if one more thing may be looked at; otherwise the turn is over."""
        if self._looks <= 0:
            self.is_over = True
            return False
        self._looks -= 1
        return True
