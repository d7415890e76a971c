"""Copies of gradients whose memory others may change at any time."""

from collections.abc import Callable

from gradserve_server.accumulators.gradient import Gradient
from gradserve_server.devices.device import Allocate
from gradserve_server.devices.reducer import Reducer


class PrivateCopies:
    """Copies live gradients, for whatever must not change any more."""

    def __init__(self, reducer: Reducer, allocate: Allocate) -> None:
        """Takes what copies, and what allocates memory."""
        self._reducer = reducer
        self._allocate = allocate

    def stage(self, gradient: Gradient) -> tuple[Gradient, Callable[[], None]]:
        """Prepares a copy of the dense values; returns the gradient with it, and the function that carries it out.

        Raises:
            MemoryError: There is not enough memory.
        """
        copies = {name: self._allocate(value.shape, value.dtype) for name, value in gradient.dense.items()}

        def fill() -> None:
            self._reducer.scale(list(gradient.dense.values()), 1.0, list(copies.values()))

        return Gradient({**gradient.sparse, **copies}, owned=True), fill

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with copies of the dense values.

        Raises:
            MemoryError: There is not enough memory.
        """
        copied, fill = self.stage(gradient)
        fill()
        return copied
