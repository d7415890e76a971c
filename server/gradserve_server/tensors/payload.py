"""The payload beside a message: its memory, the parts that tensors take, its arrival, and limits on all that arrive."""

import asyncio
import contextlib
from bisect import bisect_right, insort
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.frames import ALIGNMENT
from gradserve_server.devices.device import Array
from gradserve_server.errors import AbortedError
from gradserve_server.resources.budget import Reservation
from gradserve_server.tensors.spec import Fault, TensorSpec


class Arrival:
    """Memory that is filled from its beginning to its end, by any thread.

    Awaited on the event loop, by one task at a time.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._loop = asyncio.get_running_loop()
        self._start = _address(memory)
        self._size = memory.size
        self._num_arrived = 0
        self._num_wanted = memory.size + 1
        self._waiter: asyncio.Future[None] | None = None

    def advance(self, num_bytes: int) -> None:
        """Notes that more bytes have arrived. Called by the thread that received them."""
        self._num_arrived += num_bytes
        if self._num_arrived >= self._num_wanted:
            self._num_wanted = self._size + 1
            self._loop.call_soon_threadsafe(self._wake)

    async def of(self, part: NDArray[Any]) -> None:
        """Waits until an array in the memory has arrived."""
        await self._reach(_address(part) - self._start + part.nbytes)

    async def of_all(self) -> None:
        """Waits until everything has arrived."""
        await self._reach(self._size)

    async def _reach(self, num_bytes: int) -> None:
        while self._num_arrived < num_bytes:
            self._waiter = self._loop.create_future()
            self._num_wanted = num_bytes
            if self._num_arrived >= num_bytes:  # meanwhile, and `advance` may not have seen that somebody waits
                return
            try:
                await self._waiter
            finally:
                self._waiter = None  # if it was cancelled, it has the error, whose traceback has this frame

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_MAX_OUT_OF_ORDER = 4096
"""Inserting a hundred thousand ranges in descending order would keep all others waiting for seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class PayloadSegment:
    """A part of a payload.

    Attributes:
        start: The first byte of the payload that it holds.
        memory: Its bytes: one-dimensional, of dtype uint8.
        is_live: Whether it is the client's memory, which can change at any time, rather than the call's own.
        on_gpu: Whether it is memory of the ops' GPU.
    """

    start: int
    memory: Array
    is_live: bool = False
    on_gpu: bool = False


class Payload:
    """The payload of one call.

    Not thread-safe: used on the event loop only.

    Attributes:
        memory: The reservation of the call's own memory in it, from which new owners of tensors take their share.
    """

    def __init__(
        self,
        segments: Sequence[PayloadSegment],
        memory: Reservation | None,
        done: Callable[[], None] = lambda: None,
        arrival: Arrival | None = None,
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes over memory.

        Args:
            segments: The segments, in ascending order.
            memory: The reservation of the call's own memory among them.
            done: Called once, after the last read of the segments.
            arrival: Progress of the call's own memory; None if all of it has arrived.
            has_left: Returns whether the client has given up the call; valid once the whole payload has arrived.
        """
        self.memory = memory
        self._segments = segments
        self._starts = [segment.start for segment in segments]
        self._taken: list[tuple[int, int]] = []
        self._out_of_order = 0
        self._allocated = 0 if memory is None else memory.used
        self._own_bytes = self._num_own = 0
        self._unopened = 0
        self._users = 0
        self._done: Callable[[], None] | None = done
        self._arrival = arrival
        self._has_left = has_left

    def take(self, places: Sequence[tuple[TensorSpec, int]]) -> list[tuple[Array, PayloadSegment] | Fault]:
        """Returns the arrays of tensors in the payload, each with its segment, or why it cannot be there.

        Args:
            places: The specs of tensors, and the first byte of each.
        """
        return [self._take(spec, offset) for spec, offset in places]

    def _take(self, spec: TensorSpec, offset: int) -> tuple[Array, PayloadSegment] | Fault:
        end = offset + spec.num_bytes
        if offset % ALIGNMENT:
            return Fault(f"expected a multiple of {ALIGNMENT}, got {offset}", ".payload_offset")
        index = bisect_right(self._starts, offset) - 1
        segment = self._segments[index] if index >= 0 else None
        if segment is None or end > segment.start + segment.memory.size:
            size = 0 if segment is None else segment.start + segment.memory.size
            return Fault(
                f"expected {spec.num_bytes} bytes within one segment of the payload, got an offset of {offset} "
                f"where the segment ends at {size}",
                ".payload_offset",
            )
        if self._taken and self._taken[-1][1] > offset:
            fault = self._take_out_of_order(offset, end)
            if fault is not None:
                return Fault(fault, ".payload_offset")
        else:
            self._taken.append((offset, end))
        self._unopened += 1
        if not segment.is_live:
            self._num_own += 1
            self._own_bytes += spec.num_bytes
        memory = segment.memory[offset - segment.start : end - segment.start]
        return memory.view(spec.dtype).reshape(spec.shape), segment

    def _take_out_of_order(self, start: int, end: int) -> str | None:
        """Notes a range that is not behind all others; returns what is wrong with it, if anything is."""
        self._out_of_order += 1
        if self._out_of_order > _MAX_OUT_OF_ORDER:
            return f"expected at most {_MAX_OUT_OF_ORDER} tensors that are not in the order of the payload"
        index = bisect_right(self._taken, (start, end))
        if (index and self._taken[index - 1][1] > start) or (index < len(self._taken) and self._taken[index][0] < end):
            return "expected tensors that do not overlap in the payload"
        insort(self._taken, (start, end))
        return None

    @property
    def num_bytes(self) -> int:
        """The bytes of all segments."""
        return sum([segment.memory.size for segment in self._segments])

    @property
    def on_gpu(self) -> Sequence[PayloadSegment]:
        """The segments that are in memory of the ops' GPU."""
        return [segment for segment in self._segments if segment.on_gpu]

    def replace(self, copies: Mapping[int, PayloadSegment]) -> None:
        """Replaces segments by copies that the call owns and `memory` counts.

        Call it before tensors take parts of the payload.

        Args:
            copies: The copies by the start of the segment.
        """
        self._segments = [copies.get(segment.start, segment) for segment in self._segments]
        self._allocated += sum(copy.memory.nbytes for copy in copies.values())

    def adopt(self, num_bytes: int) -> None:
        """Reserves memory for a copy of a tensor in the client's memory, which the call will own.

        Raises:
            ResourceExhaustedError: There is no room for it.
        """
        assert self.memory is not None, "a payload with tensors has a reservation"
        self.memory.grow(num_bytes)
        self._allocated += num_bytes
        self._own_bytes += num_bytes
        self._num_own += 1

    @property
    def is_filled(self) -> bool:
        """True if tensors fill the call's own memory, but for gaps between them.

        Otherwise taking over a tensor would keep more memory alive than is counted.
        """
        return self._allocated - self._own_bytes < ALIGNMENT * max(self._num_own, 1)

    async def arrived(self, part: NDArray[Any] | None = None) -> None:
        """Waits until a tensor or a part of it has arrived, or the whole payload for None."""
        if self._arrival is not None:
            await (self._arrival.of_all() if part is None else self._arrival.of(part))

    @property
    def is_lent(self) -> bool:
        """True if parts are in the client's memory and may still be read."""
        return any(segment.is_live for segment in self._segments)

    def check_lender(self) -> None:
        """Checks that the client still lends what is in its memory. Called when all of the payload has arrived.

        If it returns, everything read before was what the client has sent.

        Raises:
            AbortedError: It has given up the call.
        """
        if self.is_lent and self._has_left():
            raise AbortedError("the caller has left, and its memory may hold something else by now", caller_left=True)

    def begin_use(self, num_tensors: int) -> None:
        """Notes that a call opens some of the tensors."""
        self._users += 1
        self._unopened -= num_tensors

    def end_use(self) -> None:
        """Notes that the call has closed them. After the last use, memory that has no new owner is freed."""
        self._users -= 1
        if self._unopened <= 0:
            self.close()

    def close(self) -> None:
        """Frees memory that has no new owner, now or after the last use."""
        self._unopened = 0
        if self._users == 0 and self._done is not None:
            if self.memory is not None:
                self.memory.settle(0)
            done, self._done = self._done, None
            self._segments = ()
            done()


NO_PAYLOAD = Payload((), None)


class InFlight:
    """Bounds the bytes of payloads that are arriving or not used yet; payloads above the limit wait.

    Waiters are served first in, first out. A payload above the limit gets its turn when nothing else is in flight.
    While any wait, senders must keep to a minimum rate. Not thread-safe: used on the event loop only.

    Attributes:
        senders: The senders of the payloads in flight.
    """

    def __init__(self, limit: int, least_rate: int = 0) -> None:
        self.senders = Senders(least_rate)
        self._limit = limit
        self._used = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """The bytes in flight."""
        return self._used

    @property
    def num_waiting(self) -> int:
        """The number of payloads that wait for their turn."""
        return len(self._waiting)

    async def enter(self, num_bytes: int) -> None:
        """Waits until `num_bytes` more may be in flight."""
        if not self._waiting and self._fits(num_bytes):
            self._used += num_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (num_bytes, turn)
        self._waiting.append(entry)
        if self._timer is None:
            self.senders.begin()
            self._look_later()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(num_bytes)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(entry)
                self._serve()
            raise

    def leave(self, num_bytes: int) -> None:
        """Removes `num_bytes`, which were used or dropped."""
        self._used -= num_bytes
        self._serve()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator["Place"]:
        """Waits until `num_bytes` more may be in flight, and counts them for the length of the block.

        Yields their place, which can outlast the block.
        """
        await self.enter(num_bytes)
        place = Place(self, num_bytes)
        try:
            yield place
        except BaseException:
            place.leave()
            raise
        place.end_block()

    def look(self) -> None:
        """Checks the senders, and goes on every `LOOK_SECONDS` while others wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if any(not turn.done() for _, turn in self._waiting):
            self._look_later()  # first, so that it goes on whatever comes of this look
            self.senders.look()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    def _fits(self, num_bytes: int) -> bool:
        return not self._used or self._used + num_bytes <= self._limit

    def _serve(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.done():
                if not self._fits(num_bytes):
                    return
                self._used += num_bytes
                turn.set_result(None)
            self._waiting.popleft()


class Place:
    """The place of a payload among those in flight. Used on the event loop only."""

    def __init__(self, in_flight: InFlight, num_bytes: int) -> None:
        self._in_flight: InFlight | None = in_flight
        self._num_bytes = num_bytes
        self._num_unused = 0
        self._timer: asyncio.TimerHandle | None = None

    def outlast(self, num_tensors: int) -> Callable[[], None]:
        """Makes the place last until a call has used the payload, but no longer than `USE_SECONDS` after the block.

        Without that, the next payload would arrive beside those that nobody has used yet.

        Args:
            num_tensors: The number of tensors in the payload.

        Returns:
            A function to call for each tensor that is freed.
        """
        self._num_unused = num_tensors
        return self._drop_one

    def end_block(self) -> None:
        """Leaves, unless the place outlasts the block."""
        if self._num_unused:
            self._timer = asyncio.get_running_loop().call_later(USE_SECONDS, self.leave)
        else:
            self.leave()

    def leave(self) -> None:
        """Leaves, unless that has happened."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.leave(self._num_bytes)

    def _drop_one(self) -> None:
        self._num_unused -= 1
        if not self._num_unused:
            self.leave()


T = TypeVar("T")

USE_SECONDS = 1.0
"""The time in which a call is expected to use what was uploaded for it."""
LOOK_SECONDS = 1.0
"""The time between two looks at senders."""
LOOKS = 10
"""The number of looks after which a sender's rate is judged."""


class TooSlowError(Exception):
    """A sender is below the minimum rate while others wait for its memory."""


@dataclass(eq=False)
class _Sender:
    num_arrived: Callable[[], int]
    patience: asyncio.Timeout
    in_messages: bool
    before: int
    num_looks: int


class Senders:
    """Minimum send rates for clients whose uploads hold scarce memory. They apply only while others wait.

    If the server itself pauses, it looks less often, and bytes that arrive in the pause count in the sender's favor.
    Used on the event loop only.
    """

    def __init__(self, least_rate: int) -> None:
        self._least_rate = least_rate
        self._senders: dict[_Sender, None] = {}

    async def receive(self, receiving: Awaitable[T], num_arrived: Callable[[], int], *, in_messages: bool = False) -> T:
        """Awaits data from a sender.

        Args:
            receiving: Receives the data.
            num_arrived: Returns a count of bytes that grows as they arrive; it need not start at 0.
            in_messages: Whether the count grows only with complete messages. The rate is then judged after each.

        Raises:
            TooSlowError: The data came too slowly.
        """
        try:
            async with asyncio.timeout(None) as patience:
                sender = _Sender(num_arrived, patience, in_messages, num_arrived(), -1)  # the first second is shorter
                self._senders[sender] = None
                try:
                    return await receiving
                finally:
                    del self._senders[sender]
        except TimeoutError:
            if not patience.expired():
                raise
            raise TooSlowError(
                f"it arrived with less than {self._least_rate} bytes per second (min_arrival_rate) while others were "
                "waiting for the room that it takes"
            ) from None

    def begin(self) -> None:
        """Starts to measure rates, as others begin to wait; earlier rates do not matter."""
        for sender in self._senders:
            sender.before, sender.num_looks = sender.num_arrived(), 0

    def look(self) -> None:
        """Ends transfers that are too slow. Called every `LOOK_SECONDS` while others wait."""
        for sender in self._senders:
            sender.num_looks += 1
            num_bytes = sender.num_arrived() - sender.before
            if sender.num_looks < LOOKS or (sender.in_messages and not num_bytes):
                continue
            if num_bytes < self._least_rate * LOOK_SECONDS * sender.num_looks:
                sender.patience.reschedule(asyncio.get_running_loop().time())
            sender.before, sender.num_looks = sender.before + num_bytes, 0
