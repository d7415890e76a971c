"""Gradients in the memory of their clients, who write to it again as soon as it is their own."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

from gradserve_protocol.frames import aligned
from gradserve_server.accumulators.gradient import Array, Gradient, SparseSlices
from gradserve_server.accumulators.incoming import GradientReceiver
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.tensors.incoming import IncomingTensor, TensorOpener, tensors_in
from gradserve_server.tensors.payload import Payload, PayloadSegment
from gradserve_server.tensors.spec import TensorSpec
from tests.accumulators.gradients import gradient_of

_SOMETHING_ELSE = 0xFF
"""A byte of no number: whoever reads it gets what nobody has sent."""


class Lender:
    """A client that lends its memory for one call, which may arrive several times.

    Attributes:
        has_left: Whether the call has ended for it, with an answer or without.
    """

    def __init__(self) -> None:
        self.has_left = False

    def lend(self, gradient: Gradient) -> "Lent":
        """Returns the gradient as a connection to the Unix socket has it when the call arrives."""
        return Lent(self, gradient)


class Lent:
    """A gradient in memory that a client has lent.

    Its client has it back when the call has been answered and nobody reads it any more; at once if it left before the
    call arrived.
    """

    def __init__(self, lender: Lender, gradient: Gradient) -> None:
        arrays: list[Array] = []
        for value in gradient.values.values():
            arrays += [value.indices, value.values] if isinstance(value, SparseSlices) else [value]
        self._memory = np.zeros(sum(aligned(each.nbytes) for each in arrays), np.uint8)
        self._end = 0
        self._payload = Payload(
            [PayloadSegment(0, self._memory, is_live=True)], None, self._returned, has_left=lambda: lender.has_left
        )
        self._given = gradient_of(
            {
                name: (self._placed(value.indices), self._placed(value.values))
                if isinstance(value, SparseSlices)
                else self._placed(value)
                for name, value in gradient.values.items()
            },
            self._payload,
        )
        if lender.has_left:
            self._returned()

    def opening(self, spec: AccumulatorSpec, place: Place, opener: TensorOpener) -> Callable[..., Awaitable[Any]]:
        """Returns what opens the gradient for a sum."""
        receiver = GradientReceiver(opener, InlineCompute(), Reducer(ForkJoin(1)))
        return partial(receiver.open, spec, place, self._given)

    def close(self) -> None:
        """Ends the call."""
        self._payload.close()

    def _placed(self, array: Array) -> IncomingTensor:
        start, self._end = self._end, self._end + aligned(array.nbytes)
        self._memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        (tensor,) = tensors_in(self._payload, [("", TensorSpec(array.dtype, array.shape), start)])
        return tensor

    def _returned(self) -> None:
        self._memory[:] = _SOMETHING_ELSE
