"""The versions of parameters that are kept: for readers, also packed, and for calls that may lack them yet."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.codecs import Codec, UnpackableError
from gradserve_protocol.digest import digest_of
from gradserve_server.accumulators.averages import KeptAverages
from gradserve_server.accumulators.gradient import Array, Average, Value
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.sharding.home import part_id
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import quoted
from gradserve_server.parameters.ledger import UpdateLedger, VersionLoaded
from gradserve_server.parameters.record import DecidedRound, DecidedSum, RoundRecord, RoundRecords
from gradserve_server.parameters.spec import Rules
from gradserve_server.parameters.variables import Variables
from gradserve_server.resources.budget import Reservation
from gradserve_server.runtime.event_loop import BackgroundTasks


@dataclass(frozen=True)
class Version(Average):
    """The parameters at one step.

    Attributes:
        digest: The digest of its values.
        record: The record of the round that made it; None for one that was loaded into parameters on one server.
        decided: At the home of sharded parameters, what the other servers need to make it; None for the first version.
    """

    digest: bytes = b""
    record: RoundRecord | None = None
    decided: DecidedRound | None = None


def version_of(average: Average, *, digest: bytes = b"", record: RoundRecord | None = None) -> Version:
    """Returns an average as a version, with its digest, and the record of its round if there is one.

    Raises:
        ValueError: The record is that of a round with another result.
    """
    fields: dict[str, Any] = dict(vars(average))
    fields.pop("nbytes", None)
    values = cast(Mapping[str, Array], average.values)
    digest = digest or digest_of(values.values())
    if record is not None and record.digest_after != digest:
        raise ValueError(f"the values of step {average.step} are not those of the record of its round")
    return Version(**fields | {"digest": digest, "record": record})


class Versions(KeptAverages):
    """All versions that are kept, and the records of the rounds that made them."""

    def __init__(
        self,
        *kept: Any,
        ledger: UpdateLedger,
        variables: Variables,
        records: RoundRecords,
        forget_rounds: Callable[[Sequence[int]], object],
    ) -> None:
        """Begins without versions.

        Args:
            kept: The arguments of `KeptAverages`.
            ledger: The ledger, which has the updates of the round.
            variables: The variables.
            records: Takes the records of rounds.
            forget_rounds: Called with the steps of the rounds whose records are no longer kept.
        """
        super().__init__(*kept)
        self._forget_rounds = forget_rounds
        self._ledger = ledger
        self._variables = variables
        self._records = records
        self._digest = variables.digest

    @property
    def newest(self) -> Version:
        """The newest version."""
        newest = self.history.newest()
        assert isinstance(newest, Version), "there is one from the beginning"
        return newest

    def begin(self) -> None:
        """Notes that the variables have other values than a round has made."""
        self._digest = self._variables.digest

    def of_current(self, rounds: Rounds, values: Mapping[str, Value]) -> Version:
        """Returns the version of the round that is about to end, with its record, without keeping it yet."""
        self._ledger.applied()
        average = super().of_current(rounds, values)
        record = self._record(average.step)
        self._digest = record.digest_after
        return version_of(average, digest=record.digest_after, record=record)

    async def keep_again(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Keeps a version of an earlier run of the server, of whose rounds the records are known."""
        super().add(average, answered)

    def answered(self, average: Average, rounds: Rounds) -> Version:
        """Returns a version as a current answer; of sharded parameters, with what the other servers need."""
        version = super().answered(average, rounds)
        assert isinstance(version, Version), "there are only versions"
        if self._decision is None or version.record is None or version.record.decided is None:
            return version
        oldest = min([each.step for each in self.all_kept], default=version.step)
        return replace(version, decided=replace(version.record.decided, oldest_version=oldest))

    def drop_before(self, step: int) -> None:
        """Drops versions before a step, but not the newest one."""
        newest = self.newest.round_number
        older = {each.round_number for each in self.history.all_kept if each.step < step}
        self.drop(older - {newest})

    def record_of_load(self, event: VersionLoaded) -> RoundRecord | None:
        """Returns the record of values that were loaded into sharded parameters, at their home; elsewhere None."""
        if self._decision is None or event.taken_by is None or event.rules is None:
            return None
        optimizer, schedule = event.rules.optimizer, event.rules.schedule
        return RoundRecord(
            step=event.step,
            reason="loaded",
            end_time=self._ledger.wall_clock(),
            updates=(),
            refusals=(),
            digest_before=self._digest,
            digest_after=self._variables.digest,
            lr=event.rules.learning_rate(self._variables.rounds),
            optimizer=optimizer,
            decided=DecidedRound(event.step, optimizer, schedule, loaded=part_id(event.taken_by)),
        ).chained(self._records.last_hash)

    def add(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Keeps a version for readers and for the calls that it answers, and the record of its round."""
        super().add(average, answered)
        record = average.record if isinstance(average, Version) else None
        if record is not None:
            self._forget_rounds(self._records.add(record))

    def _record(self, step: int) -> RoundRecord:
        ledger, variables = self._ledger, self._variables
        ended, rules = ledger.ended, ledger.round_rules
        assert ended is not None, "the round is about to end"
        updates = ledger.updates
        if variables.reports:
            updates = [
                replace(update, norm=report.norm, cosine=report.cosine, dropped=report.is_dropped)
                for update, report in zip(updates, variables.reports, strict=True)
            ]
        return RoundRecord(
            step=step,
            reason=ended.reason,
            end_time=ended.end_time,
            updates=tuple(updates),
            refusals=tuple(ledger.refusals),
            digest_before=self._digest,
            digest_after=variables.digest,
            lr=rules.learning_rate(variables.rounds - 1),
            optimizer=rules.optimizer,
            decided=self._decided(step, rules),
        ).chained(self._records.last_hash)

    def _decided(self, step: int, rules: Rules) -> DecidedRound | None:
        if self._decision is None:
            return None
        rounds, reports = self._ledger.rounds, self._variables.reports
        parts = self._decision.parts(rounds)
        decided = DecidedRound(step, rules.optimizer, rules.schedule, parts.ids, parts.weights)
        if parts.sums:
            members = {each.part: each for each in rounds.members.held}
            of_sums = [(place, members[parts.ids[place]]) for place in parts.sums]
            sums = [DecidedSum(place, each.num_gradients, each.discount) for place, each in of_sums]
            decided = replace(decided, sums=tuple(sums))
        if not reports:
            return decided
        by_id = {each.part: report for each, report in zip(rounds.members.held, reports, strict=True)}
        scales = tuple([by_id[part].scale for part in parts.ids])
        factors = tuple([by_id[part].factor for part in parts.ids])
        is_scaled, is_chosen = set(scales) != {1.0}, factors != parts.weights
        return replace(decided, scales=scales if is_scaled else (), factors=factors if is_chosen else ())


PackedValues = Mapping[str, NDArray[np.uint8]]
"""The packed components of a version, by name."""
RunAll = Callable[[Sequence[Callable[[], object]]], None]
"""Calls functions, perhaps in several threads, and returns when all have returned."""

_MOST_KEPT = 2
"""The packed versions that are kept for each parameters: the newest, and one for another codec or a late reader."""
_PART = 1 << 20
"""The values that a thread packs at a time, a multiple of all blocks."""


def one_by_one(pieces: Sequence[Callable[[], object]]) -> None:
    """Calls functions in this thread."""
    for piece in pieces:
        piece()


class PackedVersions:
    """Packs the versions of one parameters, and keeps the latest results. Used on the event loop only."""

    def __init__(self, compute: Compute, memory: Reservation, run_all: RunAll = one_by_one) -> None:
        """Takes what packs, and where the memory of the results counts.

        Args:
            compute: Runs what takes long away from the event loop.
            memory: A reservation of the owners of the memory, for others like it.
            run_all: Runs the parts of that on several cores.
        """
        self._compute = compute
        self._memory = memory
        self._run_all = run_all
        self._tasks = BackgroundTasks()
        self._kept: dict[tuple[bytes, str], tuple[asyncio.Task[PackedValues], Reservation]] = {}
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """The memory of those that are kept."""
        return sum([memory.used for _, memory in self._kept.values()])

    async def of(self, version: Version, codec: Codec) -> PackedValues:
        """Returns a version packed with a codec. Goes on if the caller is cancelled, for others.

        Raises:
            InvalidArgumentError: A value does not fit into the codec.
            ResourceExhaustedError: There is not enough memory.
        """
        key = (version.digest, codec.name)
        kept = self._kept.pop(key, None)
        if kept is None:
            sizes: dict[str, Any] = dict(version.values)
            memory = self._memory.another(sum([codec.num_bytes(value.size) for value in sizes.values()]))
            kept = self._tasks.begin(self._pack(key, version, codec)), memory
        self._kept[key] = kept
        while len(self._kept) > _MOST_KEPT:
            self._forget(next(iter(self._kept)))
        try:
            return await asyncio.shield(kept[0])
        finally:
            if self._is_closed:
                self.close()

    def close(self) -> None:
        """Forgets all, and gives their memory back; keeps none from now on."""
        self._is_closed = True
        for key in list(self._kept):
            self._forget(key)

    async def _pack(self, key: tuple[bytes, str], version: Version, codec: Codec) -> PackedValues:
        values: dict[str, Any] = dict(version.values)
        work = max(2 * version.nbytes, PIECE_BYTES * len(values))
        try:
            return await self._compute.run(work, packed_values, values, codec, self._run_all)
        except BaseException:
            self._forget(key)
            raise

    def _forget(self, key: tuple[bytes, str]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept[1].settle(0)


def packed_values(values: Mapping[str, Array], codec: Codec, run_all: RunAll = one_by_one) -> PackedValues:
    """Packs the components of a version.

    Raises:
        InvalidArgumentError: A value does not fit into the codec.
    """
    packed = {name: np.empty(codec.num_bytes(value.size), np.uint8) for name, value in values.items()}
    errors: dict[str, str] = {}
    run_all([piece for name, value in values.items() for piece in _pieces(name, value, codec, packed[name], errors)])
    for name in values:
        if name in errors:
            raise InvalidArgumentError(f"component {quoted(name)} of the version: {errors[name]}", field="codec")
    for array in packed.values():
        array.flags.writeable = False
    return packed


def _pieces(
    name: str, value: Array, codec: Codec, packed: NDArray[np.uint8], errors: dict[str, str]
) -> Iterable[Callable[[], object]]:
    flat = value.reshape(-1)

    def pack(begin: int) -> None:
        start = begin // codec.block_size * codec.block_bytes
        try:
            part = codec.encode(flat[begin : begin + _PART])
        except UnpackableError as error:
            errors[name] = str(error)
        else:
            packed[start : start + part.size] = part

    return [partial(pack, begin) for begin in range(0, flat.size, _PART)]
