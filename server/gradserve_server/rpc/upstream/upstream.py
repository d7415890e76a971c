"""The server upstream as an aggregator sees it, whatever the connection."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from gradserve.calls.exchange import Operation
from gradserve.calls.server import Cluster
from gradserve.v1 import accumulator_pb2, tensor_pb2
from gradserve.wire.arrays import Array
from gradserve_server.accumulators.gradient import Average

T = TypeVar("T")


class Upstream(Protocol):
    """Makes calls on accumulators upstream."""

    @property
    def cluster(self) -> Cluster:
        """The servers upstream."""
        ...

    async def run(self, operation: Operation[T]) -> T:
        """Carries out an operation of a client of these servers.

        Raises:
            ServiceError: See `call`.
        """
        ...

    async def call(self, method: str, request: Any, *, target: int | None = None) -> Any:
        """Makes a call without tensors; returns the response.

        Args:
            method: The method of AccumulatorService.
            request: The request, on the accumulator that it names unless there is a target.
            target: The index of the server.

        Raises:
            ServiceError: What the server says, or that it cannot be reached.
        """
        ...

    async def send(
        self,
        method: str,
        ref: accumulator_pb2.AccumulatorRef,
        arrays: Sequence[Array],
        request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
        wait: float = 0.0,
    ) -> tuple[Any, Average | None]:
        """Makes a call with tensors in its request; returns the response, and its average if it has one.

        Args:
            method: The method of AccumulatorService.
            ref: The accumulator.
            arrays: The tensors.
            request: Returns the request for the messages of the tensors.
            wait: Seconds that the server may wait for others; math.inf for no limit.

        Raises:
            ServiceError: See `call`.
        """
        ...

    async def wait(self, method: str, request: Any, wait: float) -> tuple[Any, Average]:
        """Makes a call that waits for an average; returns the response and the average.

        Args:
            method: The method of AccumulatorService.
            request: The request.
            wait: Seconds that the server may wait for others; math.inf for no limit.

        Raises:
            ServiceError: See `call`.
        """
        ...
