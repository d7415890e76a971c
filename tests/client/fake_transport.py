"""Transports without a network: what a test says answers each exchange, one after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gradserve.calls.exchange import (
    NOT_CARRIED,
    Allocate,
    CleanUp,
    DescribeTransport,
    Exchange,
    Operation,
    Reply,
    Together,
    Track,
    Whole,
    Work,
    forget,
)
from gradserve.results import TransportInfo
from gradserve.transport.driving import completed, drive
from gradserve.transport.progress import TransferProgress

T = TypeVar("T")


class FakeTransport:
    """Runs operations for the blocking client. Operations that run together run one after the other.

    Attributes:
        is_closed: Whether the client has closed it.
    """

    def __init__(self, answer: Callable[[Exchange], Any]) -> None:
        """Takes what answers an exchange, or raises its error."""
        self.is_closed = False
        self._answer = answer

    def run(self, operation: Operation[T], /) -> T:
        return completed(drive(operation, partial(perform, self._answer)))

    def close(self) -> None:
        self.is_closed = True


class FakeAsyncTransport:
    """Runs operations for the client of asyncio as `FakeTransport` does, without an event loop."""

    def __init__(self, answer: Callable[[Exchange], Any]) -> None:
        self.is_closed = False
        self._answer = answer

    async def run(self, operation: Operation[T], /) -> T:
        return await drive(operation, partial(perform, self._answer))

    async def close(self) -> None:
        self.is_closed = True


async def perform(answer: Callable[[Exchange], Any], exchange: Exchange) -> Any:
    if isinstance(exchange, Together):
        return [await drive(each, partial(perform, answer)) for each in exchange.operations]
    match exchange:
        case Whole():
            return Reply(answer(exchange.call)) if exchange.over_grpc else NOT_CARRIED
        case Allocate(shape, dtype):
            return np.empty(shape, dtype)
        case DescribeTransport():
            return TransportInfo("grpc", "it is a test")
        case Track():
            return TransferProgress.of(exchange)
        case CleanUp():
            return forget
        case Work(run):
            return run()
    return answer(exchange)
