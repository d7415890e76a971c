"""The journals of durable parameters in a state directory, and their records."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from gradserve_server.accumulators.gradient import Array, Average
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.journal import FileJournal, RoundJournals, RoundTables
from gradserve_server.accumulators.ledger import Answer, Event
from gradserve_server.accumulators.records import (
    EVENTS,
    call_of,
    call_record,
    contribution_of,
    contribution_record,
    fill_ledger,
    ledger_record,
    spec_of,
    spec_record,
)
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.parameters.closing import Closer
from gradserve_server.parameters.ledger import (
    EvaluationReported,
    RulesChanged,
    StepTaken,
    UpdateAnswered,
    UpdateLedger,
    VersionLoaded,
)
from gradserve_server.parameters.metrics import evaluation_of, evaluation_record, metrics_of, metrics_record
from gradserve_server.parameters.optimizers import optimizer_of, optimizer_record
from gradserve_server.parameters.optimizers.optimizer import Optimizer, schedule_of, schedule_record
from gradserve_server.parameters.record import DecidedRound, DecidedSum, Refusal, RoundRecord, RoundUpdate
from gradserve_server.parameters.reductions.spec import reduction_of, reduction_record
from gradserve_server.parameters.round_rules import rules_of, rules_record, staleness_of, staleness_record
from gradserve_server.parameters.spec import Normalization, ParametersSpec, Rules, UpdateKind
from gradserve_server.parameters.variables import OptimizerState, Variables
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import (
    Durability,
    EventRecords,
    Record,
    Recording,
    Rows,
    record_of,
    value_of,
)
from gradserve_server.storage.store import Change, Space, StateStore

# Rules and specs


def all_rules_record(rules: Rules) -> Record:
    """Converts rules to a record; the reverse of `all_rules_of`."""
    return {
        "optimizer": optimizer_record(rules.optimizer),
        "rounds": rules_record(rules.rounds),
        "schedule": schedule_record(rules.schedule),
    }


def all_rules_of(record: Record) -> Rules:
    """Converts a record to rules.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    return Rules(optimizer_of(record["optimizer"]), rules_of(record["rounds"]), schedule_of(record["schedule"]))


_PLAIN = (
    "clip_norm",
    "keep_versions",
    "deterministic",
    "refuse_non_finite",
    "one_per_worker",
    "keep_rounds",
)
_SHARDED = ("num_shards", "server", "follows")


def parameters_spec_record(spec: ParametersSpec) -> Record:
    """Converts a spec to a record; the reverse of `parameters_spec_of`."""
    return {
        "updates": spec_record(spec.updates),
        "rules": all_rules_record(spec.rules),
        "update": spec.update.value,
        "staleness": staleness_record(spec.staleness),
        "normalization": spec.normalization.value,
        "reduction": reduction_record(spec.reduction),
        **{name: getattr(spec, name) for name in _PLAIN},
        **({name: getattr(spec, name) for name in _SHARDED} if spec.num_shards else {}),
    }


def parameters_spec_of(record: Record) -> ParametersSpec:
    """Converts a record to a spec.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    updates = spec_of(record["updates"])
    return ParametersSpec(
        components=updates.components,
        rules=all_rules_of(record["rules"]),
        update=UpdateKind(record["update"]),
        staleness=staleness_of(record["staleness"]),
        normalization=Normalization(record["normalization"]),
        reduction=reduction_of(record["reduction"]),
        durability=updates.durability,
        agreement=updates.agreement,
        **{name: record[name] for name in _PLAIN},
        **{name: record[name] for name in _SHARDED if name in record},
    )


# Events and the state that they lead to

_UPDATE_EVENTS: EventRecords[Any] = EventRecords(
    {
        "update_answered": UpdateAnswered,
        "step_taken": StepTaken,
        "rules_changed": RulesChanged,
        "version_loaded": VersionLoaded,
        "evaluation_reported": EvaluationReported,
    },
    {
        "call": call_record,
        "taken_by": call_record,
        "contribution": contribution_record,
        "metrics": metrics_record,
        "rules": lambda rules: None if rules is None else all_rules_record(rules),
    },
    {
        "call": call_of,
        "taken_by": call_of,
        "contribution": contribution_of,
        "metrics": metrics_of,
        "outcome": Outcome,
        "rules": lambda record: None if record is None else all_rules_of(record),
    },
)


def _event_record(event: Event) -> Record:
    records: EventRecords[Any] = _UPDATE_EVENTS if _UPDATE_EVENTS.has(type(event)) else EVENTS
    return records.record(event)


def _event_of(record: Record) -> Event:
    records: EventRecords[Any] = _UPDATE_EVENTS if _UPDATE_EVENTS.knows(record["event"]) else EVENTS
    event: Event = records.event(record)
    return event


def update_ledger_record(ledger: UpdateLedger) -> Record:
    """Returns a ledger in types that JSON has; the reverse of `fill_update_ledger`."""
    return {
        **ledger_record(ledger),
        "time": ledger.closer.latest,
        "closer": ledger.closer.record(ledger.closer.latest),
        "round_rules": all_rules_record(ledger.round_rules),
        "next_rules": all_rules_record(ledger.next_rules),
        "updates": [record_of(each, {"metrics": metrics_record}) for each in ledger.updates],
        "refusals": [record_of(each, {}) for each in ledger.refusals],
        "weights": asdict(ledger.weights),
        "workers": dict(ledger.clients),
        "evaluations": [evaluation_record(each) for each in ledger.evaluations],
    }


def fill_update_ledger(ledger: UpdateLedger, record: Record) -> None:
    """Fills an empty ledger from a record.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    fill_ledger(ledger, record)
    ledger.closer = Closer.of(record["closer"], record["time"])
    ledger.round_rules = all_rules_of(record["round_rules"])
    ledger.next_rules = all_rules_of(record["next_rules"])
    ledger.restore_updates([value_of(RoundUpdate, each, {"metrics": metrics_of}) for each in record["updates"]])
    ledger.refusals.extend(value_of(Refusal, each, {}) for each in record["refusals"])
    for name, value in record["weights"].items():
        setattr(ledger.weights, name, value)
    ledger.know_clients(record["workers"])
    # Earlier servers had no metrics and no evaluations.
    ledger.evaluations.restore([evaluation_of(each) for each in record.get("evaluations", ())])


PARAMETERS: Recording[Any, UpdateLedger] = Recording(
    resource="parameters",
    events="parameters_event",
    snapshots="parameters_ledger",
    event_record=_event_record,
    event_of=_event_of,
    state_record=update_ledger_record,
    fill_state=fill_update_ledger,
    apply=UpdateLedger.replay,
)


# Rounds and the state of optimizers


def round_record_record(record: RoundRecord) -> Record:
    """Converts the record of a round to types that JSON has; the reverse of `round_record_of`."""
    converters = dict.fromkeys(("digest_before", "digest_after", "hash"), bytes.hex)
    converted = record_of(
        record,
        {
            **converters,
            "updates": lambda updates: [_update_row(each) for each in updates],
            "refusals": lambda refusals: [list(record_of(each, {}).values()) for each in refusals],
            "optimizer": optimizer_record,
            "decided": _decided_record,
        },
    )
    if record.decided is None:
        del converted["decided"]
    if any(each.metrics for each in record.updates):
        converted["metrics"] = [metrics_record(each.metrics) for each in record.updates]
    return converted


def _update_row(update: RoundUpdate) -> list[Any]:
    row = record_of(update, {})
    del row["metrics"]  # which stand beside the rows, if there are any
    return list(row.values())


def _decided_record(decided: DecidedRound | None) -> Record | None:
    if decided is None:
        return None
    record = record_of(decided, {"optimizer": optimizer_record, "schedule": schedule_record})
    if not decided.sums:
        del record["sums"]  # as earlier servers have written it
    return record


def round_record_of(record: Record) -> RoundRecord:
    """Converts a record to the record of a round.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    converters = dict.fromkeys(("digest_before", "digest_after", "hash"), bytes.fromhex)
    rest = dict(record)
    metrics = rest.pop("metrics", None)
    found = value_of(
        RoundRecord,
        rest,
        {
            **converters,
            "updates": lambda rows: tuple([RoundUpdate(*row) for row in rows]),
            "refusals": lambda rows: tuple([Refusal(*row) for row in rows]),
            "optimizer": optimizer_of,
            "decided": _decided_of,
        },
    )
    if metrics is None:
        return found
    with_metrics = [replace(each, metrics=metrics_of(one)) for each, one in zip(found.updates, metrics, strict=True)]
    return replace(found, updates=tuple(with_metrics))


def _decided_of(record: Record) -> DecidedRound:
    converters = {
        "optimizer": optimizer_of,
        "schedule": schedule_of,
        "sums": lambda sums: tuple([DecidedSum(*each) for each in sums]),
    }
    return value_of(DecidedRound, record, converters)


def state_record(state: OptimizerState) -> Record:
    """Converts the state of an optimizer, without its arrays, to a record; the reverse of `state_of`."""
    return {
        "optimizer": optimizer_record(state.optimizer),
        "component_steps": dict(state.component_steps),
        "rounds": state.rounds,
        "slots": {slot: list(arrays) for slot, arrays in state.slots.items()},
    }


def state_of(record: Record, arrays: Sequence[Array]) -> OptimizerState:
    """Converts a record and its arrays to the state of an optimizer.

    Raises:
        DAMAGES, InvalidArgumentError: It is no such record.
    """
    names = [(slot, name) for slot, components in record["slots"].items() for name in components]
    if len(names) != len(arrays):
        raise ValueError(f"expected {len(names)} arrays of the optimizer's state, got {len(arrays)}")
    slots: dict[str, dict[str, Array]] = {slot: {} for slot in record["slots"]}
    for (slot, name), array in zip(names, arrays, strict=True):
        slots[slot][name] = array
    return OptimizerState(slots, record["component_steps"], record["rounds"], optimizer_of(record["optimizer"]))


# Journals


class ParametersJournal(FileJournal):
    """The journal of parameters: with each version, the state of the optimizer and the record of the round.

    Attributes:
        variables: The variables, whose state is written.
    """

    tables = RoundTables(
        "parameters", "parameters_update", "parameters_version", "parameters_part", states="parameters_state"
    )

    variables: Variables
    _beginning: Change | None = None
    _state_blob: int | None = None
    _state_space: Space | None = None

    def begin(self, change: Change) -> None:
        """Takes the change that creates the parameters, which is written with their first version."""
        self._beginning = change

    def change(self) -> Change:
        """Returns a change that writes the noted events, after the creation."""
        noted = super().change()
        beginning, self._beginning = self._beginning, None
        if beginning is not None:
            noted.statements[:0] = beginning.statements
        return noted

    async def append(self, event: Event) -> None:
        """Notes an event for the next write; changed rules and evaluations are on disk when this returns."""
        if not isinstance(event, RulesChanged | EvaluationReported) or self.has_ended:
            await super().append(event)
            return
        change = Change()
        self.write(change, event)
        await self.store.commit(change)
        self.shorten()

    async def reserve(self, num_bytes: int) -> None:
        """Reserves disk space for the version of the round, and the state of its optimizer.

        Args:
            num_bytes: Not used: the sizes are those of the variables.
        """
        await self.reserve_version(self.variables.round_optimizer)

    async def reserve_version(self, optimizer: Optimizer) -> None:
        """Reserves disk space for a version and the state of the optimizer that goes with it.

        Raises:
            ServiceError: There is no space; nothing has changed.
        """
        await super().reserve(self.variables.spec.version_bytes)
        space = await self.store.reserve(self.variables.state_bytes(optimizer))
        if self.has_ended:
            self.store.give_back(space)  # the parameters were deleted in the meantime
            return
        self._give_back_state()  # of a round that did not end
        self._state_space = space

    def add_result(self, change: Change, average: Average, answered: Sequence[RequestId]) -> None:
        """Adds a version to a change, with the state of the optimizer and the record of its round."""
        super().add_result(change, average, answered)
        state = self.variables.state
        arrays = [array for values in state.slots.values() for array in values.values()]
        space, self._state_space = self._state_space, None
        blob = self.store.new_blob()
        change.put(blob, arrays, space)  # the next round, which changes them, waits for this
        change.execute(
            "INSERT INTO parameters_state (parameters, record, blob) VALUES (?, ?, ?) "
            "ON CONFLICT (parameters) DO UPDATE SET record = excluded.record, blob = excluded.blob",
            *(self.number, json.dumps(state_record(state)), blob),
        )
        if self._state_blob is not None:
            change.remove([self._state_blob])
        self._state_blob = blob
        record = average.record if isinstance(average, Version) else None
        if record is not None:
            change.execute(
                "INSERT INTO parameters_round (parameters, step, record) VALUES (?, ?, ?) "
                "ON CONFLICT (parameters, step) DO UPDATE SET record = excluded.record",
                *(self.number, record.step, json.dumps(round_record_record(record))),
            )

    def forget_rounds(self, steps: Sequence[int]) -> None:
        """Removes the records of rounds that are no longer kept."""
        if not steps or self.has_ended:
            return
        change = Change()
        for step in steps:
            change.execute("DELETE FROM parameters_round WHERE parameters = ? AND step = ?", self.number, step)
        self.store.add(change)

    def end(self) -> Change:
        """Ends the journal; returns the change that removes everything of the deleted parameters."""
        change = super().end()
        self._give_back_state()
        if self._state_blob is not None:
            change.remove([self._state_blob])
        return change

    def begin_again(self, state_blob: int | None) -> None:
        """Continues the journal of an earlier run of the server, whose state is in this blob, if it was written."""
        self._state_blob = state_blob

    def _give_back_state(self) -> None:
        space, self._state_space = self._state_space, None
        if space is not None:
            self.store.give_back(space)


class ParametersJournals(RoundJournals[UpdateLedger, ParametersJournal]):
    """The journals of a server's durable parameters.

    Attributes:
        new_calls: Returns an empty memory of calls that uses no budget of the server, to make snapshots with.
    """

    new_calls: Callable[[], CallMemory[Answer]]

    def __init__(self, store: StateStore, default: Durability) -> None:
        super().__init__(store, PARAMETERS, default)

    def empty_state(self, number: int, rows: Rows) -> UpdateLedger:
        """Returns the ledger of parameters before their first event."""
        ((spec,),) = rows("SELECT spec FROM parameters WHERE id = ?", number)
        return UpdateLedger(self.new_calls(), parameters_spec_of(json.loads(spec)))

    def begin(
        self, key: ResourceKey, spec: ParametersSpec, lifetime: Lifetime, incarnation: str
    ) -> ParametersJournal | None:
        """Returns the journal of new parameters, of what is here; None for durability NONE."""
        durability = spec.here.durability
        assert durability is not None, "the registry has chosen one"
        if durability is Durability.NONE:
            return None
        number = self.new_number()
        change = Change()
        change.execute(
            "INSERT INTO parameters (id, container, name, owner, incarnation, durability, spec, lifetime) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(number, key.container, key.name, key.user.name, incarnation, durability.value),
            *(json.dumps(parameters_spec_record(spec)), json.dumps(asdict(lifetime))),
        )
        journal = self._journals[key] = ParametersJournal(self, number, durability)
        journal.begin(change)
        return journal

    def begin_again(
        self, key: ResourceKey, number: int, durability: Durability, position: int, state_blob: int | None
    ) -> ParametersJournal:
        """Returns the journal of restored parameters, given the position of their latest event."""
        updates = self.store.rows("SELECT blob FROM parameters_update WHERE parameters = ? ORDER BY position", number)
        versions = dict(self.store.rows("SELECT round, blob FROM parameters_version WHERE parameters = ?", number))
        journal = self._journals[key] = ParametersJournal(
            self,
            number,
            durability,
            position=position,
            gradients=[blob for (blob,) in updates],
            averages=versions,
        )
        journal.begin_again(state_blob)
        return journal
