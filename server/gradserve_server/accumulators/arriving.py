"""Checks gradients while they arrive."""

from gradserve_server.accumulators.given import GivenDense, GivenGradient
from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.host.reduction.reducer import Reducer
from gradserve_server.tensors.references import Attached, PayloadMemory

_PART_BYTES = 4 << 20
"""The part of a tensor that is checked at a time: it has just arrived, and is still in the cache."""


class ArrivingGradients:
    """Waits for gradients that arrive beside their message, and checks what is there of them."""

    def __init__(self, compute: Compute, reducer: Reducer) -> None:
        """Takes what runs the checks, and what checks."""
        self._compute = compute
        self._reducer = reducer

    async def receive(self, spec: AccumulatorSpec, given: GivenGradient, payload: PayloadMemory) -> None:
        """Returns when a gradient is there. Of components with finite values only, that is then noted.

        Errors are left to those who use the gradient: it may be one that they know already.

        Args:
            spec: The accumulator's spec.
            given: The gradient as the request has it.
            payload: What comes beside the message.
        """
        if spec.refuse_non_finite:
            for component in given.components:
                value = component.value
                if not isinstance(value, GivenDense) or not isinstance(value.tensor, Attached):
                    continue
                if not await self._is_finite(value.tensor.array, payload):
                    break
                given.finite.add(component.name)
        await payload.arrived()

    async def _is_finite(self, values: Array, payload: PayloadMemory) -> bool:
        flat = values.reshape(-1)
        size = _PART_BYTES // values.itemsize
        for start in range(0, flat.size, size):
            part = flat[start : start + size]
            await payload.arrived(part)
            if await self._compute.run(part.nbytes, self._reducer.first_non_finite, [part]) is not None:
                return False
        return True
