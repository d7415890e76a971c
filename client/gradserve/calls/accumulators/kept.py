"""Gradients that a client keeps until they are durable, to send them again if the server loses them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from gradserve.calls.identity import CallId
from gradserve_protocol.arrays import AnyArray, Array, host_array
from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.v1 import tensor_pb2

DEFAULT_KEPT_BYTES = 1 << 30
_IDLE_BYTES = 256 << 20
_REQUEST_BYTES = 2048
"""The memory of a kept request, beside its arrays."""

MakeRequest: TypeAlias = Callable[[Sequence[tensor_pb2.Tensor]], Any]
"""Makes the request that adds a contribution from the messages of its arrays."""


class Answer(Protocol):
    """The part of an answer that tells the round of a contribution; see `service.Accepted`."""

    @property
    def round(self) -> int:
        """The number of the round that it is in."""
        ...

    @property
    def num_rounds(self) -> int:
        """The number of rounds that have ended."""
        ...


class KeptMemory:
    """The memory of the gradients that a client keeps. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pool = BufferPool(min(max_bytes, _IDLE_BYTES))
        self._lock = threading.Lock()
        self._used = 0

    def copies_of(self, arrays: Sequence[AnyArray]) -> tuple[Array, ...] | None:
        """Returns copies of arrays, which `release` has to follow; None if there is no room for them."""
        num_bytes = _bytes_of(arrays)
        with self._lock:
            if self._used + num_bytes > self._max_bytes:
                return None
            self._used += num_bytes
        try:
            copies = tuple([self._pool.empty(array.shape, array.dtype) for array in arrays])
        except MemoryError:
            self._give_back(num_bytes)
            return None
        for copy, array in zip(copies, arrays, strict=True):
            copy[...] = host_array(array)
        return copies

    def release(self, copies: Sequence[Array]) -> None:
        """Gives back the room of copies."""
        self._give_back(_bytes_of(copies))

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._used -= num_bytes


def _bytes_of(arrays: Sequence[AnyArray]) -> int:
    return _REQUEST_BYTES + sum([array.nbytes for array in arrays])


@dataclass(eq=False)
class KeptGradient:
    """A gradient that the server has accepted, and a crash would lose.

    Attributes:
        call: Its request id.
        round: The round that it is in.
        server: The incarnation of the server that accepted it.
        request: Makes its request again; None if it could not be kept.
        arrays: Its arrays; likewise.
    """

    call: CallId
    round: int
    server: str
    request: MakeRequest | None
    arrays: tuple[Array, ...] | None


@dataclass
class KeptGradients:
    """The gradients of one accumulator that are kept. Safe to use from several threads."""

    memory: KeptMemory
    _by_call: dict[CallId, KeptGradient] = field(default_factory=dict)
    _first_round: int = 0
    """None of them is in an earlier round."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._by_call)

    @property
    def oldest(self) -> KeptGradient | None:
        """The gradient that has been kept for longest."""
        with self._lock:
            return next(iter(self._by_call.values()), None)

    def accepted(
        self,
        call: CallId,
        answer: Answer,
        server: str,
        request: MakeRequest,
        arrays: Sequence[AnyArray] | None,
    ) -> None:
        """Keeps a gradient that a server has accepted, unless its round has ended already.

        Args:
            call: Its request id.
            answer: What the server said.
            server: The incarnation of the server.
            request: Makes its request again.
            arrays: Its arrays, which are copied; None if the client does not have them.
        """
        self.learned(server, answer.num_rounds)
        if answer.num_rounds >= answer.round:
            return
        with self._lock:
            known = self._by_call.get(call)
        if known is not None:
            known.round, known.server = answer.round, server
        else:
            copies = None if arrays is None else self.memory.copies_of(arrays)
            with self._lock:
                if not self._by_call:
                    self._first_round = answer.round
                self._by_call[call] = KeptGradient(
                    call, answer.round, server, None if copies is None else request, copies
                )

    def again(self, gradient: KeptGradient, answer: Answer, server: str) -> None:
        """Notes that a server has accepted a gradient again."""
        if answer.num_rounds >= answer.round:
            self.forget([gradient])
        else:
            gradient.round, gradient.server = answer.round, server

    def learned(self, server: str, num_rounds: int) -> None:
        """Forgets what is durable, as a server says that so many rounds have ended.

        Only of the gradients that the same run of the server accepted: another one has lost the round of the others.
        """
        if not self._by_call or num_rounds < self._first_round:
            return
        with self._lock:
            found = [each for each in self._by_call.values() if each.server == server and each.round <= num_rounds]
        self.forget(found)

    def accepted_elsewhere(self, server: str) -> list[KeptGradient]:
        """Returns the gradients that another run of the server has accepted, in the order of their request ids."""
        with self._lock:
            found = [each for each in self._by_call.values() if each.server != server]
        return sorted(found, key=lambda each: each.call)

    def forget(self, gradients: Iterable[KeptGradient] | None = None) -> int:
        """Forgets gradients, None for all; returns how many were still kept."""
        with self._lock:
            given = list(self._by_call.values() if gradients is None else gradients)
            gone = [each for each in given if self._by_call.pop(each.call, None) is not None]
            self._first_round = min([each.round for each in self._by_call.values()], default=0)
        for each in gone:
            if each.arrays is not None:
                self.memory.release(each.arrays)
        return len(gone)
