"""Gradients that a client keeps until they are durable, to send them again if the server loses them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from gradserve.memory.pool import BufferPool
from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import tensor_pb2
from gradserve.wire.payload import Array

DEFAULT_KEPT_BYTES = 1 << 30
_IDLE_BYTES = 256 << 20
_REQUEST_BYTES = 2048
"""The memory of a kept request, beside its arrays."""
_AHEAD_BYTES = 8 << 20
"""Copying less takes hardly longer than starting a thread for it."""

MakeRequest: TypeAlias = Callable[[Sequence[tensor_pb2.Tensor]], messages_pb2.ApplyGradientRequest]
"""Makes the request of an apply from the messages of its arrays."""


class KeptMemory:
    """The memory of the gradients that a client keeps. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        """Takes the most bytes to keep."""
        self._max_bytes = max_bytes
        self._pool = BufferPool(min(max_bytes, _IDLE_BYTES))
        self._lock = threading.Lock()
        self._used = 0

    def room_for(self, arrays: Sequence[Array]) -> tuple[Array, ...] | None:
        """Returns arrays for copies of these, which `release` has to follow; None if there is no room for them."""
        num_bytes = _bytes_of(arrays)
        with self._lock:
            if self._used + num_bytes > self._max_bytes:
                return None
            self._used += num_bytes
        try:
            return tuple([self._pool.empty(array.shape, array.dtype) for array in arrays])
        except MemoryError:
            self._give_back(num_bytes)
            return None

    def release(self, copies: Sequence[Array]) -> None:
        """Gives back the room of copies."""
        self._give_back(_bytes_of(copies))

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._used -= num_bytes


def _bytes_of(arrays: Sequence[Array]) -> int:
    return _REQUEST_BYTES + sum([array.nbytes for array in arrays])


class Copying:
    """Copies the arrays of a gradient: large ones in a thread, while the server gets them.

    A context manager, which lasts as long as the call with the gradient. Copies that nobody takes are given back at its
    end.
    """

    def __init__(self, memory: KeptMemory, arrays: Sequence[Array]) -> None:
        """Begins to copy arrays if they are large. They must not change until `take`, or the end."""
        self._memory = memory
        self._arrays = arrays
        self._copies: tuple[Array, ...] | None = None
        self._thread: threading.Thread | None = None
        if _bytes_of(arrays) >= _AHEAD_BYTES:
            self._copies = memory.room_for(arrays)
            if self._copies is not None:
                self._thread = threading.Thread(target=_copy, args=(arrays, self._copies), name="gradserve-kept")
                self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            self._memory.release(copies)

    def take(self) -> tuple[Array, ...] | None:
        """Returns the copies, which `KeptMemory.release` has to follow; None if there is no room for them."""
        if self._thread is not None:
            self._thread.join()
        elif self._copies is None:
            self._copies = self._memory.room_for(self._arrays)
            if self._copies is not None:
                _copy(self._arrays, self._copies)
        copies, self._copies = self._copies, None
        return copies


def _copy(arrays: Sequence[Array], copies: Sequence[Array]) -> None:
    for copy, array in zip(copies, arrays, strict=True):
        copy[...] = array


@dataclass(eq=False)
class KeptGradient:
    """A gradient that the server has accepted, and a crash would lose.

    Attributes:
        number: Its request id.
        round: The round that it is in.
        server: The incarnation of the server that accepted it.
        request: Makes its request anew; None if it could not be kept.
        arrays: Its arrays; likewise.
    """

    number: int
    round: int
    server: str
    request: MakeRequest | None
    arrays: tuple[Array, ...] | None


@dataclass
class KeptGradients:
    """The gradients of one accumulator that are kept. Safe to use from several threads."""

    memory: KeptMemory
    _by_number: dict[int, KeptGradient] = field(default_factory=dict)
    _first_round: int = 0
    """None of them is in an earlier round."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def oldest(self) -> KeptGradient | None:
        """The gradient that has been kept for longest."""
        with self._lock:
            return next(iter(self._by_number.values()), None)

    def accepted(
        self,
        number: int,
        answer: messages_pb2.ApplyGradientResponse,
        server: str,
        request: MakeRequest,
        copying: Copying | None,
    ) -> None:
        """Keeps a gradient that a server has accepted, unless its round has ended already.

        Args:
            number: Its request id.
            answer: What the server said.
            server: The incarnation of the server.
            request: Makes its request anew.
            copying: Copies its arrays; None if the client does not have them.
        """
        self.learned(server, answer.num_rounds)
        if answer.num_rounds >= answer.round:
            return
        with self._lock:
            known = self._by_number.get(number)
        if known is not None:
            known.round, known.server = answer.round, server
        else:
            copies = None if copying is None else copying.take()
            with self._lock:
                if not self._by_number:
                    self._first_round = answer.round
                self._by_number[number] = KeptGradient(
                    number, answer.round, server, None if copies is None else request, copies
                )

    def again(self, gradient: KeptGradient, answer: messages_pb2.ApplyGradientResponse, server: str) -> None:
        """Notes that a server has accepted a gradient again."""
        if answer.num_rounds >= answer.round:
            self.forget([gradient])
        else:
            gradient.round, gradient.server = answer.round, server

    def learned(self, server: str, num_rounds: int) -> None:
        """Forgets what is durable, as a server says that so many rounds have ended.

        Only of the gradients that the same run of the server accepted: another one has lost the round of the others.
        """
        if not self._by_number or num_rounds < self._first_round:
            return
        with self._lock:
            found = [each for each in self._by_number.values() if each.server == server and each.round <= num_rounds]
        self.forget(found)

    def accepted_elsewhere(self, server: str) -> list[KeptGradient]:
        """Returns the gradients that another run of the server has accepted, in the order of their request ids."""
        with self._lock:
            found = [each for each in self._by_number.values() if each.server != server]
        return sorted(found, key=lambda each: each.number)

    def forget(self, gradients: Iterable[KeptGradient] | None = None) -> int:
        """Forgets gradients, None for all; returns how many were still kept."""
        with self._lock:
            given = list(self._by_number.values() if gradients is None else gradients)
            gone = [each for each in given if self._by_number.pop(each.number, None) is not None]
            self._first_round = min([each.round for each in self._by_number.values()], default=0)
        for each in gone:
            if each.arrays is not None:
                self.memory.release(each.arrays)
        return len(gone)
