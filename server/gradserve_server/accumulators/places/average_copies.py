"""Copies of averages in other memory than theirs."""

from collections.abc import Mapping

from gradserve_server.accumulators.gradient import HostCopy, Value


class AverageCopies:
    """Copies the averages of an accumulator on the host: there is nothing to copy."""

    def host_copy(self, values: Mapping[str, Value]) -> HostCopy | None:
        """Returns the copy of an average in host memory, not made yet; None if it is there already."""
        return None

    async def brought(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Returns the values of an average, which are on the host, where averages of this accumulator are.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        return values
