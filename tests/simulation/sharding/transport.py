"""What carries a client's operations over the simulated network: the steps are those of the real transports."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from gradserve.calls.exchange import (
    Allocate,
    Background,
    Operation,
    Pause,
    Reply,
    TimeLimits,
    Together,
    Unary,
    Whole,
    Work,
)
from gradserve.calls.retries import Attempt, Attempts, Contact, RetryPolicy, Step, with_retries
from gradserve.errors import CallCancelledError, GradserveError
from gradserve.transport.aio.transport import ConcurrentSteps
from gradserve.transport.driving import drive
from gradserve_protocol.tensors import WithContents, encode_message
from tests.simulation.sharding.network import Network
from tests.simulation.sharding.run import response_class
from tests.simulation.sharding.truth import Truth

T = TypeVar("T")

TIMES = TimeLimits(call=15.0)
_POLICY = RetryPolicy(restart_patience=10.0, jitter=0.0)


class SimulatedTransport:
    """Runs the operations of one client.

    Attributes:
        decided: The latest average that a home has answered.
        answered_by: The run of the server that has answered it, and when.
        requests: All requests for parts of averages: the index of the server, the method, and the message.
    """

    def __init__(self, client: str, network: Network, truth: Truth, pause: Callable[[], float]) -> None:
        """Takes, among others, how many seconds it waits before it asks for a part of an average."""
        self._client = client
        self._network = network
        self._truth = truth
        self._contact = Contact()
        self._background: list[asyncio.Task[None]] = []
        self._pause = pause
        self.decided: Any = None
        self.answered_by: tuple[Any, float] = (None, 0.0)
        self.requests: list[tuple[int, str, bytes]] = []

    async def run(self, operation: Operation[T], /) -> T:
        """See `AsyncTransport`."""
        return await drive(self._attempts(operation, self._contact), self._perform)

    async def close(self) -> None:
        """See `AsyncTransport`."""
        self.abandon()

    def abandon(self) -> None:
        """Ends what runs in the background, as the end of the process does."""
        for task in self._background:
            task.cancel()

    def _attempts(self, operation: Operation[T], contact: Contact) -> Attempts[T]:
        return with_retries(operation, TIMES, _POLICY, asyncio.get_running_loop().time, contact)

    async def _perform(self, step: Step) -> Any:
        match step:
            case Attempt(Whole(call), timeout):
                return Reply(await self._ask(call, timeout))
            case Attempt(Unary() as call, timeout):
                return await self._ask(call, timeout)
            case Work(run):
                return run()
            case Pause(seconds):
                return await asyncio.sleep(seconds)
            case Together(operations):
                return await ConcurrentSteps(
                    self._perform, lambda operation: self._attempts(operation, self._contact)
                ).run(operations)
            case Background(begin):
                self._background.append(asyncio.ensure_future(self._in_background(begin())))
                return None
            case Allocate(shape, dtype):
                return np.empty(shape, dtype)
        raise CallCancelledError(f"no step of these operations: {step}")

    async def _in_background(self, operation: Operation[None]) -> None:
        with suppress(GradserveError):
            await drive(self._attempts(operation, Contact()), self._perform)

    async def _ask(self, call: Unary, timeout: float | None) -> Any:
        name = f"{call.service}/{call.method}"
        message: Any = call.request.message if isinstance(call.request, WithContents) else call.request
        self._truth.sent(call.method, message)
        if call.method == "ReduceGradients":
            self.requests.append((call.target, name, encode_message(call.request)))
            await asyncio.sleep(self._pause())
        run = self._network.runs[call.target]
        data = await self._network.ask(self._client, call.target, name, encode_message(call.request), timeout)
        reply = response_class(name).FromString(data)
        self._truth.answered(call.method, message, reply)
        if call.method == "StageGradient":
            self._truth.check_withdrawn(message, self._network.runs[call.target])
        if call.method != "ReduceGradients" and "average" in reply.DESCRIPTOR.fields_by_name:
            self.decided = reply.average if reply.HasField("average") else None
            self.answered_by = run, asyncio.get_running_loop().time()
        return reply
