"""The memory of averages that several parts keep."""

from gradserve_server.accumulators.gradient import Average


class KeptBytes:
    """Counts the memory of averages, each once, however many parts keep it.

    Attributes:
        total: The bytes of all averages that are kept.
    """

    def __init__(self) -> None:
        self.total = 0
        self._keepers: dict[int, int] = {}
        """The number of parts that keep the average of a round, by number of the round."""
        self._dropped: list[int] = []

    def add(self, average: Average) -> None:
        """Notes that another part keeps an average."""
        keepers = self._keepers.get(average.round_number, 0)
        self._keepers[average.round_number] = keepers + 1
        if not keepers:
            self.total += average.nbytes

    def remove(self, average: Average) -> None:
        """Notes that a part keeps an average no more."""
        keepers = self._keepers.pop(average.round_number) - 1
        if keepers:
            self._keepers[average.round_number] = keepers
        else:
            self.total -= average.nbytes
            average.release()
            self._dropped.append(average.round_number)

    def take_dropped(self) -> list[int]:
        """Returns the numbers of the rounds whose averages nobody keeps any more, since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped
