"""The records of rounds: who took part, what came of it, and a chain of hashes over them."""

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from sys import getsizeof
from typing import NamedTuple

from gradserve_server.accumulators.gradient import Contribution, Metrics, Share, Summand
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.parameters.metrics import mean_metrics, metrics_bytes
from gradserve_server.parameters.optimizers import name_of
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule
from gradserve_server.resources.budget import Reservation

_MOST_ENTRIES = 1 << 16
"""The most updates and refusals in the records that are kept, whatever `keep_rounds` says: others need memory, too."""
_RECORD_BYTES = 768
_ENTRY_BYTES = 272
"""The measured memory of a record, and of each of its updates and refusals beside the id of its worker."""
_DECIDED_BYTES, _PART_BYTES = 1024, 128
"""That of what the other servers of sharded parameters need, and of each update there."""
NO_HASH = bytes(32)
"""The hash before the first record."""


@dataclass(frozen=True, slots=True)
class RoundUpdate:
    """An update of a round.

    Attributes:
        worker_id: Its sender; may be empty.
        weight_asked: The weight that its sender asked for.
        weight: The weight that counted.
        staleness: The number of versions made since the one from which it was computed.
        num_bytes: The size of its values.
        norm: Its L2 norm over all components, before clipping; None if it was not computed.
        cosine: Its cosine to the reduced update; None likewise.
        dropped: Whether the reduction left it out, or would have.
        metrics: What its worker has measured.
    """

    worker_id: str
    weight_asked: float
    weight: float
    staleness: int
    num_bytes: int
    norm: float | None = None
    cosine: float | None = None
    dropped: bool = False
    metrics: Metrics = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An update that was refused while a round was open.

    Attributes:
        worker_id: Its sender; may be empty.
        weight: The weight that its sender asked for.
        reason: "stale" or "already counted".
    """

    worker_id: str
    weight: float
    reason: str


class DecidedSum(NamedTuple):
    """The sum of several updates in a round of sharded parameters.

    Attributes:
        place: Its place among the updates of the round.
        num_updates: The number of its updates.
        discount: The factor of its values, which are multiplied with the weights of its updates already.
    """

    place: int
    num_updates: int
    discount: float


@dataclass(frozen=True, slots=True)
class DecidedRound:
    """A round that the home of sharded parameters has ended, as the other servers need it to make the version.

    Attributes:
        step: The step that it led to: greater by one than that before, unless values were loaded.
        optimizer: The optimizer.
        schedule: The schedule of its learning rate.
        part_ids: The ids under which servers hold its updates, in the order in which they are summed; none if values
            were loaded.
        weights: Their weights, in that order.
        scales: The factors by which clip_norm limits them, in that order; none if all are 1.
        factors: Their factors in the reduced update; none if these are the weights. See `Decision`.
        loaded: The id of the values that were loaded; empty if none were.
        oldest_version: The step of the oldest version that the home keeps at the time of its answer.
        sums: Those of its updates that are sums of several.
    """

    step: int
    optimizer: Optimizer
    schedule: Schedule
    part_ids: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    loaded: str = ""
    oldest_version: int = 0
    scales: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    sums: tuple[DecidedSum, ...] = ()

    @property
    def shares(self) -> list[Share]:
        """The factors of the values of each update."""
        scales = self.scales or [1.0] * len(self.weights)
        return list(map(Share, scales, self.factors or self.weights))

    @property
    def contributions(self) -> list[Contribution]:
        """The contributions of its updates, in the order of `part_ids`."""
        found = [
            Contribution(local_step=self.step - 1, weight=weight, sequence=place, share=share)
            for place, (weight, share) in enumerate(zip(self.weights, self.shares, strict=True))
        ]
        for place, num_updates, discount in self.sums:
            found[place] = replace(found[place], sum_of=(Summand(),) * num_updates, discount=discount)
        return found


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The record of a round that was applied.

    Attributes:
        step: The step that it led to.
        reason: Why it ended: "required", "grace", "expected" or "deadline". Of sharded parameters, there are also
            records of loaded values, with the reason "loaded".
        end_time: When it ended, in nanoseconds since 1970.
        updates: The updates, in order of arrival.
        refusals: What was refused meanwhile, the latest thousand.
        digest_before: The digest of the version before.
        digest_after: That of the version that it made.
        lr: The learning rate that counted, after the schedule.
        optimizer: The optimizer.
        hash: The hash over the previous record's hash and this record; see `chained`.
        decided: At the home of sharded parameters, what the other servers need. It has no part in the hash.
    """

    step: int
    reason: str
    end_time: int
    updates: tuple[RoundUpdate, ...]
    refusals: tuple[Refusal, ...]
    digest_before: bytes
    digest_after: bytes
    lr: float
    optimizer: Optimizer
    hash: bytes = b""
    decided: DecidedRound | None = None

    def chained(self, previous: bytes) -> "RoundRecord":
        """Returns a copy with its hash: BLAKE2b of 32 bytes over the previous hash and all fields in order.

        Integers are 8 bytes, floats are IEEE doubles, texts and bytes follow their length in 4 bytes, lists their
        number of entries, all big-endian. What can be missing follows a byte that says whether it is there. An
        optimizer is its name and its settings as floats. Metrics come last, and only if an update has some: records
        of earlier servers keep their hashes.
        """
        digest = blake2b(previous, digest_size=32)
        for part in _parts(self):
            digest.update(part)
        return replace(self, hash=digest.digest())

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the metrics of its updates; see `mean_metrics`."""
        return mean_metrics([(each.weight, each.metrics) for each in self.updates])


def _num_entries(record: RoundRecord) -> int:
    return len(record.updates) + len(record.refusals)


def _decided_bytes(record: RoundRecord) -> int:
    return 0 if record.decided is None else _DECIDED_BYTES + _PART_BYTES * len(record.decided.part_ids)


def _num_bytes(record: RoundRecord) -> int:
    entries: list[RoundUpdate | Refusal] = [*record.updates, *record.refusals]
    ids = sum([getsizeof(each.worker_id) for each in entries])
    ids += sum([metrics_bytes(each.metrics) for each in record.updates])
    return _RECORD_BYTES + _ENTRY_BYTES * _num_entries(record) + ids + _decided_bytes(record)


def _parts(record: RoundRecord) -> Iterable[bytes]:
    yield _packed(record.step, record.reason, record.end_time, len(record.updates))
    for update in record.updates:
        yield _packed_update(update)
    yield _packed(len(record.refusals))
    for refusal in record.refusals:
        yield _packed(refusal.worker_id, refusal.weight, refusal.reason)
    yield _packed(record.digest_before, record.digest_after, record.lr, name_of(record.optimizer))
    yield _packed(*[float(getattr(record.optimizer, each.name)) for each in fields(record.optimizer)])
    if any(each.metrics for each in record.updates):
        for update in record.updates:
            yield _packed(len(update.metrics), *[part for metric in update.metrics for part in metric])


def _packed_update(update: RoundUpdate) -> bytes:
    # In a few calls, as there may be thousands of updates.
    worker, norm, cosine = update.worker_id.encode(), update.norm, update.cosine
    numbers = struct.pack(">ddqq", update.weight_asked, update.weight, update.staleness, update.num_bytes)
    optional = b"\0" if norm is None else struct.pack(">?d", True, norm)
    optional += b"\0" if cosine is None else struct.pack(">?d", True, cosine)
    return struct.pack(">I", len(worker)) + worker + numbers + optional + (b"\1" if update.dropped else b"\0")


def _packed(*values: object) -> bytes:
    packed = b""
    for value in values:
        if isinstance(value, bool):
            packed += b"\1" if value else b"\0"
        elif isinstance(value, int):
            packed += struct.pack(">q", value)
        elif isinstance(value, float):
            packed += struct.pack(">d", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            assert isinstance(data, bytes), type(data)
            packed += struct.pack(">I", len(data)) + data
    return packed


class RoundRecords:
    """The records of the latest rounds, oldest first. Not thread-safe: used on the event loop only.

    The oldest ones go when there are too many, or no room for them in the budget. The newest one stays: its round has
    been applied.
    """

    def __init__(self, capacity: int, bookkeeping: Reservation) -> None:
        self._capacity = capacity
        self._reservation = bookkeeping.another()
        self._is_closed = False
        self._records: deque[RoundRecord] = deque()
        self._num_entries = 0
        self.last_hash = NO_HASH
        """The hash of the newest record."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RoundRecord]:
        """Yields all records, the oldest first."""
        return iter(self._records)

    def add(self, record: RoundRecord) -> list[int]:
        """Appends a record; returns the steps of those that are no longer kept."""
        dropped = []
        while self._records and not self._has_room(record):
            oldest = self._records.popleft()
            self._count(oldest, -1)
            dropped.append(oldest.step)
        self._records.append(record)
        self._count(record, 1)
        self.last_hash = record.hash
        return dropped

    def close(self) -> None:
        """Forgets all records, and gives their memory back. A round that is ending may still add one, uncounted."""
        self._is_closed = True
        self._records.clear()
        self._reservation.settle(0)

    def _has_room(self, record: RoundRecord) -> bool:
        if len(self._records) >= self._capacity or self._num_entries + _num_entries(record) > _MOST_ENTRIES:
            return False
        try:
            self._reservation.check(_num_bytes(record))
        except ResourceExhaustedError:
            return False
        return True

    def _count(self, record: RoundRecord, sign: int) -> None:
        self._num_entries += sign * _num_entries(record)
        if not self._is_closed:
            self._reservation.settle(self._reservation.used + sign * _num_bytes(record))

    def since(self, step: int, most: int) -> tuple[list[RoundRecord], bool]:
        """Returns up to `most` records of rounds that led beyond a step, and whether there are later ones."""
        found = [each for each in self._records if each.step > step]
        return found[:most], len(found) > most

    def knows(self, step: int) -> bool:
        """Returns True if the record of the round that made a version is kept, or of the round that followed it."""
        records = self._records
        if not records or not records[0].step - 1 <= step <= records[-1].step:
            return False
        return any(step in (each.step, each.step - 1) for each in records)

    def newest(self) -> RoundRecord | None:
        """Returns the newest record; None before the first."""
        return self._records[-1] if self._records else None
