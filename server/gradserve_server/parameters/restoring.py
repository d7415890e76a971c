"""Restores the parameters of a state directory when a server starts; inspects and repairs them without one."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gradserve_server.accumulators.durable.restoring import (
    Found,
    Kept,
    Row,
    average_in,
    average_rows,
    found_in,
    unlimited_calls,
    unlimited_factory,
)
from gradserve_server.accumulators.gradient import Gradient
from gradserve_server.accumulators.journal import ShardJournal
from gradserve_server.accumulators.records import contribution_of, joined
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import OutOfRangeError, ResourceExhaustedError
from gradserve_server.parameters.journal import (
    PARAMETERS,
    ParametersJournal,
    ParametersJournals,
    parameters_spec_of,
    round_record_of,
    state_of,
)
from gradserve_server.parameters.ledger import UpdateLedger
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import DecidedRound, RoundRecord
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.parameters.variables import OptimizerState
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.budget import UNLIMITED, Budget
from gradserve_server.resources.cluster import Member, MisplacedError
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import owner_named
from gradserve_server.storage.directory import DAMAGES, StateError
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import StateStore

SELECT_PARAMETERS = "SELECT id, container, name, owner, incarnation, spec, lifetime FROM parameters ORDER BY id"


@dataclass(frozen=True)
class _Stored:
    """The row of parameters."""

    number: int
    key: ResourceKey
    incarnation: str
    spec: ParametersSpec
    lifetime: Lifetime
    durability: Durability

    @classmethod
    def of_row(
        cls, number: int, container: str, name: str, owner: str, incarnation: str, spec: str, lifetime: str
    ) -> "_Stored":
        """Reads the columns of `SELECT_PARAMETERS`.

        Raises:
            DAMAGES: They are damaged.
        """
        key = ResourceKey(container, name, owner_named(owner))
        found = parameters_spec_of(json.loads(spec))
        if found.durability in (None, Durability.NONE):
            raise ValueError("their durability is NONE")
        assert found.here.durability is not None
        return cls(number, key, incarnation, found, Lifetime(**json.loads(lifetime)), found.here.durability)


async def restore_parameters(journals: ParametersJournals, registry: ParametersRegistry, allocate: Allocate) -> int:
    """Restores all parameters of a state directory; returns their number.

    Args:
        journals: The journals of the state directory.
        registry: Gets the parameters.
        allocate: Allocates memory for their values.

    Raises:
        DamagedError: Something is damaged.
        StateError: Parameters belong to another server.
        ResourceExhaustedError: They exceed the limits of the server.
    """
    store = journals.store
    # Short-lived and in another thread, so it counts in no budget.
    journals.new_calls = lambda: registry.factory.new_call_memory(Budget(UNLIMITED, "bytes").reserve())
    rows = store.rows(SELECT_PARAMETERS)
    for number, container, name, *columns in rows:
        try:
            row = _Stored.of_row(number, container, name, *columns)
            versions = _versions(store, number, allocate)
            await _make_again(store, row, registry, journals.begin_again, versions, allocate)
        except ResourceExhaustedError:
            raise
        except MisplacedError as error:
            raise StateError(
                f"{store.path}: {error}; the directory is whole: start each server on its own directory"
            ) from error
        except DAMAGES as error:
            raise journals.damaged(ResourceKey(container, name), error) from error
    return len(rows)


_BeginAgain = Callable[[ResourceKey, int, Durability, int, int], ParametersJournal | None]


async def _make_again(
    store: StateStore,
    row: _Stored,
    registry: ParametersRegistry,
    begin_again: _BeginAgain,
    versions: Sequence[Kept],
    allocate: Allocate,
) -> Parameters:
    """Restores parameters of a state directory.

    Args:
        store: The state directory.
        row: Their row.
        registry: Gets them.
        begin_again: Makes their journal, see `ParametersJournals.begin_again`; or returns None to write nothing.
        versions: Their versions, oldest first.
        allocate: Allocates memory for other values.

    Raises:
        StateError: A value cannot be read.
        DAMAGES: A record is damaged.
    """
    number = row.number
    if not versions:
        raise ValueError("there is no version")
    state, state_blob = _state(store, number, allocate)

    journal: ParametersJournal | None = None

    def fill(ledger: UpdateLedger) -> ParametersJournal | None:
        nonlocal journal
        position = PARAMETERS.replay(store.rows, number, ledger)
        newest, rounds = versions[-1][0], ledger.rounds
        if (newest.step, newest.round_number) != (rounds.global_step, rounds.current.number - 1):
            raise ValueError(f"expected a version of step {rounds.global_step}, got step {newest.step} as the newest")
        journal = begin_again(row.key, number, row.durability, position, state_blob)
        return journal

    records = _records(store, number)
    made = await registry.restore(row.key, row.spec, row.lifetime, row.incarnation, fill, versions, state, records)
    updates = store.rows(
        "SELECT contribution, names, blob FROM parameters_update WHERE parameters = ? ORDER BY position", number
    )
    count = 0
    for record, names, blob in updates:
        values = joined(json.loads(names), store.read(blob, allocate))
        gradient = Gradient(values, owned=True, finite=frozenset(values))
        contribution = contribution_of(json.loads(record))
        count += contribution.num_gradients
        await made.add_again(gradient, contribution)
    if count != made.rounds.num_accumulated:
        raise ValueError(f"expected {made.rounds.num_accumulated} updates of the current round, got {count}")
    if made.shard is not None:
        # Read even if nothing is written: those who inspect a directory want to know about damage.
        held = ShardJournal(store, number, ParametersJournal.tables) if journal is None else journal.shard
        for part in held.read(allocate):
            await made.shard.stage_again(*part)
    made.go_on()
    return made


def _state(store: StateStore, number: int, allocate: Allocate) -> tuple[OptimizerState, int]:
    rows = store.rows("SELECT record, blob FROM parameters_state WHERE parameters = ?", number)
    if not rows:
        raise ValueError("the state of the optimizer is missing")
    ((record, blob),) = rows
    return state_of(json.loads(record), store.read(blob, allocate)), int(blob)


def _versions(store: StateStore, number: int, allocate: Allocate) -> list[Kept]:
    rows = average_rows(store, number, ParametersJournal.tables)
    return [average_in(store, allocate, *each, what="version") for each in rows]


def _records(store: StateStore, number: int) -> list[RoundRecord]:
    rows = store.rows("SELECT record FROM parameters_round WHERE parameters = ? ORDER BY step", number)
    records = [round_record_of(json.loads(record)) for (record,) in rows]
    for before, record in itertools.pairwise(records):
        if record.chained(before.hash).hash != record.hash:
            raise ValueError(f"the hash of the record of step {record.step} does not follow from the one before")
    return records


# Inspection


def inspect_parameters(store: StateStore) -> Iterator[Found]:
    """Restores all parameters as a starting server does, and yields them with any damage."""

    def rounds_of(row: Row) -> Rounds:
        ledger = UpdateLedger(unlimited_calls(), _Stored.of_row(*row).spec)
        PARAMETERS.replay(store.rows, row[0], ledger)
        return ledger.rounds

    async def make(row: Row, versions: Sequence[Kept]) -> object:
        return await _try_again(store, _Stored.of_row(*row), versions)

    rows = store.rows(SELECT_PARAMETERS)
    return found_in(store, ParametersJournal.tables, rows, rounds_of, make, what="version")


def read_version(
    store: StateStore, number: int, step: int | None
) -> tuple[ParametersSpec, Version, OptimizerState | None]:
    """Returns a version of parameters of a state directory, with their present properties.

    Args:
        store: The state directory.
        number: The number of the parameters there.
        step: The step of the version; None for the newest, which alone has the state of the optimizer.

    Raises:
        OutOfRangeError: The version is not kept.
        StateError, DAMAGES: Something is damaged.
    """
    row, versions = _row_and_versions(store, number)

    async def read() -> tuple[ParametersSpec, Version, OptimizerState | None]:
        made = await _try_again(store, row, versions)
        if step is None:
            async with made.reading_state() as (version, state):
                return made.spec, version, state
        if step > made.rounds.global_step:
            raise OutOfRangeError(f"expected a step of at most {made.rounds.global_step}, got {step}", field="step")
        return made.spec, await made.read(step, 0.0), None

    return asyncio.run(read())


def _row_and_versions(store: StateStore, number: int) -> tuple[_Stored, Sequence[Kept]]:
    """Returns the row of parameters, and their versions, oldest first.

    Raises:
        StateError, DAMAGES: Something is damaged.
    """
    (columns,) = [row for row in store.rows(SELECT_PARAMETERS) if row[0] == number]
    return _Stored.of_row(*columns), _versions(store, number, np.empty)


async def _try_again(store: StateStore, row: _Stored, versions: Sequence[Kept]) -> Parameters:
    """Restores parameters on a server without limits that writes nothing.

    Raises:
        StateError, DAMAGES: A server cannot make them again.
    """
    return await _make_again(store, row, _unlimited_registry(row.spec), lambda *_: None, versions, np.empty)


def _unlimited_registry(spec: ParametersSpec, journals: ParametersJournals | None = None) -> ParametersRegistry:
    """Returns a registry without limits for parameters with this spec."""
    parallel = ForkJoin(1)
    factory, lifetimes = unlimited_factory(Reducer(parallel))
    member = Member("", spec.server, spec.num_shards) if spec.num_shards else None
    return ParametersRegistry(
        factory, lifetimes, Stepper(parallel), new_incarnation=str, member=member, journals=journals
    )


async def follow_rounds(store: StateStore, number: int, rounds: Sequence[DecidedRound]) -> None:
    """Makes the versions of rounds on the state directory of a server that follows them, as the server would.

    The store has been started.

    Raises:
        StateError, DAMAGES: A server cannot make the parameters again.
        ServiceError: A version cannot be made.
    """
    row, versions = _row_and_versions(store, number)
    journals = ParametersJournals(store, Durability.ROUND)
    journals.new_calls = unlimited_calls
    made = await _make_again(
        store, row, _unlimited_registry(row.spec, journals), journals.begin_again, versions, np.empty
    )
    await made.follow(rounds)
    await journals.settle()
