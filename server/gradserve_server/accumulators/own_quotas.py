"""The quotas that one accumulator takes from."""

from dataclasses import dataclass

from gradserve_server.resources.quotas import Quota


@dataclass(frozen=True)
class OwnQuotas:
    """The quotas of an accumulator, in which what it takes counts for its creator and its container, too.

    Attributes:
        memory: The bytes of sums, held gradients and averages, in the accumulator's place.
        host_memory: The bytes of what it has on the host, which is the same if that is its place.
        bookkeeping: The bytes of what is kept beside tensors.
        count: The number of accumulators.
        waiters: The calls that wait.
    """

    memory: Quota
    host_memory: Quota
    bookkeeping: Quota
    count: Quota
    waiters: Quota

    def begin(self, num_bytes: int) -> None:
        """Takes the place of an accumulator, with bookkeeping of this size.

        Raises:
            ResourceExhaustedError: There is none left; nothing was taken.
        """
        self.count.acquire()
        try:
            self.bookkeeping.acquire(num_bytes)
        except BaseException:
            self.count.release()
            raise

    def end(self, num_bytes: int) -> None:
        """Gives the place back."""
        self.count.release()
        self.bookkeeping.release(num_bytes)
