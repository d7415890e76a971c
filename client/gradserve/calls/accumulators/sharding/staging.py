"""Contributions to what is sharded: every server gets its part before the home counts them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Sent, arrays_of
from gradserve.calls.accumulators.contributions import ContributionWire, Given
from gradserve.calls.accumulators.sharding.shard import Parts, Uncounted
from gradserve.calls.combinators import aimed_call, together, with_beside
from gradserve.calls.exchange import CallbackError, Operation, Pause, Progress, Reply, Unary, Whole
from gradserve.results import TensorHandle
from gradserve_protocol.arrays import AnyArray
from gradserve_protocol.errors import (
    AbortedError,
    DeadlineExceededError,
    GradserveError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2

T = TypeVar("T")
_INTERVAL_SECONDS = 0.02
_MOST_REFUSALS = 20
"""The times that a home may ask for a contribution to be staged again, before something must be wrong."""
EPOCH_FIELD = "epoch"
"""The field of the error of a home that is in another epoch than the one in which a contribution was staged."""
_NOT_COUNTED_FIELD = "worker_id"
"""The field of the error of a push_pull in vain whose contribution does not count, as another of its worker does."""
USES_PER_LEASE = 3
"""The number of times that a waiting call uses the parts of other servers within their idle lease."""


class PartOfTransfer:
    """Counts the bytes that are moved to or from one server; see `Progress`.

    Transfers run in threads of their own. So this tells nobody: `moved_together` does, in the thread of the call.

    Attributes:
        num_bytes: How many bytes have been moved.
        num_received: How many bytes the reply has; None before that is known.
    """

    def __init__(self) -> None:
        self.failure: CallbackError | None = None
        self.num_bytes = 0
        self.num_received: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None, /
    ) -> None:
        pass

    def sends(self, num_bytes: int, /) -> None:
        """Ignores the size: the sum over all servers is known before."""

    def receives(self, num_bytes: int, /) -> None:
        """Notes the size of the reply, and counts from zero again."""
        if self.num_received is None:
            self.num_received, self.num_bytes = num_bytes, 0

    def begin(self, overhead: int = 0, /) -> None:
        """Begins to count, without the bytes around the arrays."""
        self.num_bytes = -overhead

    def moved(self, num_bytes: int, /) -> None:
        """Counts bytes."""
        self.num_bytes += num_bytes

    def add(self, num_bytes: int, /) -> bool:
        """Counts bytes; there is never anything to tell."""
        self.num_bytes += num_bytes
        return False

    def tell(self) -> None:
        """Tells nobody."""

    def end(self) -> None:
        """Tells nobody."""


def sent_together(
    progress: Progress | None, num_bytes: int, operations: Sequence[Callable[[Progress | None], Operation[T]]]
) -> Operation[list[T]]:
    """Runs operations that send arrays, at the same time; returns their results.

    Args:
        progress: Told how far they are; None for nobody.
        num_bytes: How many bytes they send.
        operations: Begin the operations, each with its own part of the progress.
    """
    if progress is None:
        return (yield from _together([begin(None) for begin in operations]))
    progress.sends(num_bytes)
    return (yield from _reported(progress, operations, lambda parts: True))


def received_together(
    progress: Progress | None, operations: Sequence[Callable[[Progress | None], Operation[T]]]
) -> Operation[list[T]]:
    """Runs operations that receive arrays, at the same time; returns their results.

    Args:
        progress: Told how far they are, from when all know how much they receive; None for nobody.
        operations: Begin the operations, each with its own part of the progress.
    """
    if progress is None:
        return (yield from _together([begin(None) for begin in operations]))

    def is_known(parts: Sequence[PartOfTransfer]) -> bool:
        sizes = [each.num_received for each in parts if each.num_received is not None]
        if len(sizes) < len(parts):
            return False
        progress.receives(sum(sizes))
        return True

    return (yield from _reported(progress, operations, is_known))


def _reported(
    progress: Progress,
    operations: Sequence[Callable[[Progress | None], Operation[T]]],
    is_known: Callable[[Sequence[PartOfTransfer]], bool],
) -> Operation[list[T]]:
    parts = [PartOfTransfer() for _ in operations]
    left = set(range(len(operations)))

    def tell() -> None:
        if is_known(parts):
            progress.begin()
            progress.moved(sum([max(each.num_bytes, 0) for each in parts]))

    def ended(number: int) -> Operation[list[T]]:
        result = yield from operations[number](parts[number])
        left.discard(number)
        return [result]

    def reports() -> Operation[list[T]]:
        while left:
            yield Pause(_INTERVAL_SECONDS)
            tell()
        return []

    results = yield from together(*map(ended, range(len(operations))), reports())
    tell()
    return [each for result in results for each in result]


def _together(operations: Sequence[Operation[T]]) -> Operation[list[T]]:
    if len(operations) == 1:
        return [(yield from operations[0])]
    return (yield from together(*operations))


class StagedFor(NamedTuple):
    """The incarnation of the resource at its home, and the epoch there, for which a contribution is staged.

    Attributes:
        incarnation: The incarnation.
        epoch: The epoch.
        answers: What servers have answered that the home needs.
    """

    incarnation: str
    epoch: int
    answers: Sequence[Message] = ()


class StagingWire(ContributionWire, ABC):
    """The calls that contribute to one resource that is sharded over several servers.

    Each server gets its part of a contribution before the home, which gets none of the values, counts it.
    """

    def __init__(
        self, *args: Any, parts: Parts, uncounted: Uncounted, idle_lease: float | None = None, **kwargs: Any
    ) -> None:
        """Takes the resource, and the parts of the servers.

        Args:
            *args: See `ContributionWire`.
            parts: The parts of the servers.
            uncounted: The contributions that the client has staged and that do not count.
            idle_lease: Seconds without use after which a server deletes its part; None: never.
            **kwargs: See `ContributionWire`.
        """
        super().__init__(*args, **kwargs)
        self._parts = parts
        self._uncounted = uncounted
        self._idle_lease = idle_lease

    @abstractmethod
    def _stage_at(
        self, target: int, given: Given, values: Mapping[str, Sent], staged: StagedFor, progress: Progress | None
    ) -> Operation[Message | None]:
        """Stages a server's part of a contribution; returns what it has answered that the home needs."""

    def _tell(self, message: Any, staged: StagedFor) -> None:
        """Adds what the home needs to know of a staged contribution to the request that makes it count."""
        message.epoch = staged.epoch

    @abstractmethod
    def _forget_uncounted(self, targets: Collection[int]) -> Operation[None]:
        """Ends the epoch, and tries to have servers forget what was staged in it and does not count."""

    @abstractmethod
    def _use(self, target: int) -> Operation[object]:
        """Uses the part of a server, so that its idle lease begins again."""

    @abstractmethod
    def _is_to_stage_again(self, error: AbortedError) -> Operation[bool]:
        """Returns whether a call that has failed is to be made again with a contribution that is staged again."""

    @property
    def _others(self) -> list[int]:
        """The servers with parts, other than the home."""
        return [target for target in self._parts.servers if target != self.target]

    def _unary(self, method: str, request: Message, wait: float = 0.0, *, in_place: bool = False) -> Unary:
        return aimed_call(self.target, super()._unary(method, request, wait, in_place=in_place))

    def _carried(self, values: Mapping[str, Sent]) -> Mapping[str, Sent]:
        if any(isinstance(value, TensorHandle) for value in values.values()):
            service = self._service
            be = "is" if service.subject == "accumulator" else "are"
            raise InvalidArgumentError(
                f"expected arrays, got the handle of a tensor: tensors are on server 0 of the cluster, and "
                f"{service.subject} {self.ref.name!r} {be} sharded over several servers",
                field=service.contribution,
            )
        return {}

    def _call_with_gradient(
        self,
        method: str,
        given: Given,
        _arrays: Sequence[AnyArray],
        request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
        *,
        wait: float = 0.0,
        released: bool,
        in_place: bool = False,
        progress: Progress | None,
    ) -> Operation[Reply]:
        """Stages a contribution on all servers, and then makes the call that adds it."""
        num_refusals = 0
        while True:
            staged = yield from self._stage(given, progress)
            progress = None
            message: Any = request(())
            if self._service.ref(message).incarnation != staged.incarnation:
                continue
            self._tell(message, staged)
            try:
                reply = yield from self._applied(given, self._unary(method, message, wait, in_place=in_place))
            except AbortedError as error:
                num_refusals += 1
                if num_refusals == _MOST_REFUSALS or not (yield from self._is_to_stage_again(error)):
                    raise
            except DeadlineExceededError as error:
                if error.field == _NOT_COUNTED_FIELD:
                    self._uncounted.withdraw(self._key, self._parts.servers, given.call)
                raise
            else:
                if reply.message.outcome != accumulator_pb2.APPLY_OUTCOME_ACCEPTED:
                    self._uncounted.withdraw(self._key, self._parts.servers, given.call)
                asking = self._uncounted.take_asking(self._key)
                if asking:
                    yield from self._forget_uncounted(asking)
                return reply

    def _applied(self, given: Given, call: Unary) -> Operation[Reply]:
        message: Any = call.request

        def renewed() -> Operation[None]:
            if call.renewal is not None:
                yield from call.renewal()
            # The resource may have been created again: then nothing is staged for it.
            self._tell(message, (yield from self._stage(given, None)))

        return self._waited(Whole(call._replace(renewal=renewed)))

    def _waited(self, call: Whole) -> Operation[Reply]:
        """Makes a call that may wait at the home, and keeps the parts of the other servers in use until it ends."""
        waiting = super()._waited(call)
        if self._idle_lease is None or not call.call.wait:
            return waiting
        return with_beside(waiting, self._using_others(self._idle_lease / USES_PER_LEASE))

    def _using_others(self, pause: float) -> Operation[None]:
        while True:
            yield Pause(pause)
            for target in self._others:
                try:
                    yield from self._use(target)
                except GradserveError:
                    continue  # it has no lease while it cannot be reached, and begins a new one after that

    def _stage(self, given: Given, progress: Progress | None) -> Operation[StagedFor]:
        """Stages a contribution on all servers; returns what it is staged for."""
        parts = self._parts.of_gradient(given.values)
        num_bytes = sum(array.nbytes for values in parts.values() for array in arrays_of(values)[0])
        is_full = False
        while True:
            staged = StagedFor(self.ref.incarnation, self._session.epoch)
            stage = [partial(self._stage_at, target, given, parts[target], staged) for target in self._parts.servers]
            try:
                answers = yield from sent_together(progress, num_bytes, stage)
            except ResourceExhaustedError:
                if is_full:
                    raise
                is_full = True  # perhaps of contributions that do not count
                yield from self._forget_uncounted(self._parts.servers)
                continue
            if self.ref.incarnation == staged.incarnation:
                return staged._replace(answers=[each for each in answers if each is not None])
