"""A sum of gradients that are added up before the home decides which of them form a round."""

import asyncio
from collections.abc import Callable

from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.sums.round_sum import RoundSum


class RunningSum:
    """The sum of gradients of one step that the shard does not hold: their clients keep them and can stage them again.

    It can be used if the home's round has all of them, as it usually does.

    Attributes:
        weights: The weights of the gradients, by the ids under which they were staged.
        sum: The sum.
    """

    def __init__(self, sum_: RoundSum) -> None:
        self.weights: dict[str, float] = {}
        self.sum = sum_
        self._lock = asyncio.Lock()
        self._is_over = False

    async def add(self, part_id: str, weight: float, given: Gradient, check: Callable[[Gradient], object]) -> bool:
        """Adds a gradient; returns False if the sum is already used or discarded.

        Args:
            part_id: Its id.
            weight: Its weight.
            given: The gradient.
            check: A further check of the gradient in the dtypes of the accumulator.

        Raises:
            InvalidArgumentError: It is not valid here; nothing has changed.
            ResourceExhaustedError: There is not enough memory; nothing has changed.
        """
        async with self._lock:
            if self._is_over:
                return False
            try:
                staged = await self.sum.stage(given, Contribution(weight=weight))
                try:
                    check(staged.gradient)
                    given.check_lenders()
                except BaseException:
                    self.sum.settle()
                    raise
                await self.sum.commit(staged)
                self.weights[part_id] = weight
            finally:
                await self.sum.finish()
            return True

    async def end(self) -> None:
        """Refuses additions from now on, and waits for the one in progress."""
        self._is_over = True
        async with self._lock:
            pass

    def close(self) -> None:
        """Refuses additions from now on, and frees the memory."""
        self._is_over = True
        self.sum.close()
