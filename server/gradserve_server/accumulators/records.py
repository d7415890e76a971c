"""Records of an accumulator: its events, ledger, spec, averages and the layout of values, as JSON has them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gradserve_server.accumulators.gradient import (
    Array,
    Average,
    Contribution,
    DifferentWorker,
    Measurement,
    RoundParts,
    SparseSlices,
    Summand,
    Value,
)
from gradserve_server.accumulators.identity import CallRecord, RequestId
from gradserve_server.accumulators.ledger import (
    Answer,
    AnswersReceived,
    ClientsForgotten,
    Event,
    GradientAnswered,
    Ledger,
    RoundEnded,
    StepSet,
    Taken,
)
from gradserve_server.accumulators.rounds import Applied, Members, Outcome, Pushed, Round
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout, PartialShape, Piece, Reduction
from gradserve_server.storage.journal import Durability, EventRecords, Record, Recording, record_of, value_of


def contribution_record(contribution: Contribution) -> Record:
    """Converts a contribution to a record; the reverse of `contribution_of`."""
    record: Record = {name: getattr(contribution, name) for name in ("local_step", "weight", "worker_id", "sequence")}
    if contribution.part:
        record["part"] = contribution.part
    if contribution.parameters_digest:
        record["parameters_digest"] = contribution.parameters_digest.hex()
    if contribution.sum_of:
        record["sum_of"] = [
            [each.weight, each.worker_id, call_record(each.call), each.parameters_digest.hex()]
            for each in contribution.sum_of
        ]
    if contribution.discount != 1.0:
        record["discount"] = contribution.discount
    if contribution.metrics:
        record["metrics"] = dict(contribution.metrics)
    if any(each.metrics for each in contribution.sum_of):
        record["metrics_of_sum"] = [dict(each.metrics) for each in contribution.sum_of]
    if contribution.measured:
        record["measured"] = [
            [each.server, each.squared_norm, dict(each.squared_distances)] for each in contribution.measured
        ]
    return record


def contribution_of(record: Record) -> Contribution:
    """Converts a record to a contribution.

    Raises:
        TypeError, ValueError, KeyError: It is no such record.
    """
    rest = dict(record)
    digest = bytes.fromhex(rest.pop("parameters_digest", ""))
    metrics = tuple(rest.pop("metrics", {}).items())
    sum_of = [
        # Earlier servers had no digests.
        Summand(weight, worker_id, call_of(call), bytes.fromhex(digests[0]) if digests else b"")
        for weight, worker_id, call, *digests in rest.pop("sum_of", ())
    ]
    if (of_sum := rest.pop("metrics_of_sum", None)) is not None:
        sum_of = [replace(each, metrics=tuple(found.items())) for each, found in zip(sum_of, of_sum, strict=True)]
    measured = [
        Measurement(server, tuple(norm), {part_id: tuple(terms) for part_id, terms in distances.items()})
        for server, norm, distances in rest.pop("measured", ())
    ]
    return Contribution(
        **rest, sum_of=tuple(sum_of), parameters_digest=digest, metrics=metrics, measured=tuple(measured)
    )


def call_record(call: RequestId | None) -> Record | None:
    """Converts the id of a call to a record; the reverse of `call_of`."""
    if call is None:
        return None
    return {"client_id": call.client_id, "sequence": call.sequence, "fingerprint": call.fingerprint.hex()}


def call_of(record: Record | None) -> RequestId | None:
    """Converts a record to the id of a call.

    Raises:
        TypeError, ValueError, KeyError: It is no such record.
    """
    if record is None:
        return None
    return RequestId(record["client_id"], record["sequence"], bytes.fromhex(record["fingerprint"]))


EVENTS: EventRecords[Event] = EventRecords(
    {
        "gradient_answered": GradientAnswered,
        "round_ended": RoundEnded,
        "step_set": StepSet,
        "answers_received": AnswersReceived,
        "clients_forgotten": ClientsForgotten,
    },
    {"call": call_record, "taken_by": call_record, "contribution": contribution_record},
    {"call": call_of, "taken_by": call_of, "contribution": contribution_of, "outcome": Outcome},
)


def ledger_record(ledger: Ledger) -> Record:
    """Returns a ledger in types that JSON has; the reverse of `fill_ledger`."""
    rounds, members = ledger.rounds, ledger.rounds.members
    return {
        "global_step": rounds.global_step,
        "epoch": rounds.epoch,
        "round": rounds.current.number,
        "members": [members.count, members.total_weight, members.num_nameless, list(members.workers)],
        "members_epoch": members.epoch,
        "held": [contribution_record(each) for each in members.held],
        "all_workers_known": rounds.all_workers_known,
        "missing": list(rounds.missing_workers),
        "digests": {worker_id: digest.hex() for worker_id, digest in members.digests.items()},
        "different": [[each.worker_id, each.equal_at] for each in rounds.comparison.different],
        "equal_at": dict(rounds.comparison.equal_at),
        "different_since": dict(rounds.comparison.different_since),
        "clients": [
            [client_id, window.floor, [_call_row(sequence, call) for sequence, call in window.calls.items()]]
            for client_id, window in ledger.calls.windows().items()
        ],
        "awaiting": [[each.client_id, each.sequence, each.fingerprint.hex()] for each in ledger.awaiting],
    }


def fill_ledger(ledger: Ledger, record: Record) -> None:
    """Fills an empty ledger from a record.

    Raises:
        ValueError, TypeError, KeyError: It is no such record.
    """
    rounds = ledger.rounds
    rounds.global_step = record["global_step"]
    rounds.epoch = record.get("epoch", 0)  # earlier servers had no epochs
    rounds.current = Round(record["round"])
    count, total_weight, num_nameless, workers = record["members"]
    held = [contribution_of(each) for each in record.get("held", ())]  # without sharded accumulators, there were none
    epoch = record.get("members_epoch")
    digests = {worker_id: bytes.fromhex(digest) for worker_id, digest in record.get("digests", {}).items()}
    rounds.members = Members(count, total_weight, num_nameless, dict.fromkeys(workers), held, epoch, digests)
    different = [DifferentWorker(*each) for each in record.get("different", ())]
    rounds.comparison.restore(different, record.get("equal_at", {}), record.get("different_since", {}))
    rounds.all_workers_known = record["all_workers_known"]
    rounds.expect(record["missing"])
    known = {rounds.current.number: rounds.current}
    for client_id, floor, rows in record["clients"]:
        ledger.calls.restore(client_id, floor, [_answered_call(row, known) for row in rows])
    for client_id, sequence, fingerprint in record["awaiting"]:
        ledger.expect(RequestId(client_id, sequence, bytes.fromhex(fingerprint)))


def _call_row(sequence: int, call: CallRecord[Answer]) -> list[Any]:
    answer, joined = call.record, call.record.round
    ended = None if joined is None else [joined.number, joined.step, *([True] if joined.is_dropped else [])]
    row = [sequence, call.fingerprint.hex(), ended]
    if isinstance(answer, Applied):
        row += [answer.outcome.value, answer.global_step, answer.num_accumulated]
    if isinstance(answer, Pushed):
        row += [answer.staleness, answer.weight]
    return row


def _answered_call(row: list[Any], known: dict[int, Round]) -> tuple[int, CallRecord[Answer]]:
    sequence, fingerprint, ended, *applied = row
    joined = None if ended is None else known.setdefault(ended[0], Round(*ended))
    answer: Answer
    if applied:
        outcome, *rest = applied
        kind = Pushed if len(rest) > 2 else Applied
        answer = kind(Outcome(outcome), joined, *rest)
    elif joined is None:
        raise ValueError(f"expected the round that call {sequence} took")
    else:
        answer = Taken(joined)
    return sequence, CallRecord(bytes.fromhex(fingerprint), answer)


ACCUMULATORS: Recording[Event, Ledger] = Recording(
    resource="accumulator",
    events="event",
    snapshots="ledger",
    event_record=EVENTS.record,
    event_of=EVENTS.event,
    state_record=ledger_record,
    fill_state=fill_ledger,
    apply=Ledger.replay,
)


_HOST = "cpu"


def spec_record(spec: AccumulatorSpec) -> Record:
    """Converts a spec to a record; the reverse of `spec_of`."""
    assert spec.durability is not None, "the registry has chosen one"
    return record_of(
        spec,
        {
            "components": lambda components: list(map(_component_record, components)),
            "accumulate_dtype": lambda dtype: None if dtype is None else dtype.name,
            "agreement": dict,
        },
    )


def spec_of(record: Record) -> AccumulatorSpec:
    """Converts a record to a spec.

    Raises:
        DAMAGES: It is no such record.
    """
    return value_of(
        AccumulatorSpec,
        {"device": _HOST, **record},  # servers that had no other place wrote none
        {
            "components": lambda components: tuple(map(_component_of, components)),
            "reduction": Reduction,
            "accumulate_dtype": lambda name: None if name is None else np.dtype(name),
            "durability": Durability,
        },
    )


def _component_record(component: ComponentSpec) -> Record:
    return {
        "name": component.name,
        "dtype": component.dtype.name,
        "shape": component.shape.dims,
        "layout": component.layout.value,
        "pieces": component.pieces,
    }


def _component_of(record: Record) -> ComponentSpec:
    return ComponentSpec(
        record["name"],
        np.dtype(record["dtype"]),
        PartialShape(None if record["shape"] is None else tuple(record["shape"])),
        Layout(record["layout"]),
        tuple(Piece(*piece) for piece in record.get("pieces", ())),
    )


_AVERAGE = ("step", "round_number", "num_gradients", "total_weight", "worker_ids")


def average_record(average: Average, answered: Iterable[RequestId]) -> Record:
    """Converts an average, without its values, and the answered calls to a record; the reverse of `average_of`."""
    record = {name: getattr(average, name) for name in _AVERAGE}
    if average.parts is not None:
        record["parts"] = record_of(average.parts, {})
        if not average.parts.sums:
            del record["parts"]["sums"]
    if average.different_workers:
        record["different_workers"] = [[each.worker_id, each.equal_at] for each in average.different_workers]
    return {**record, "answered": [[each.client_id, each.sequence, each.fingerprint.hex()] for each in answered]}


def average_of(record: Record, values: dict[str, Value]) -> tuple[Average, list[RequestId]]:
    """Converts a record to an average with these values, and the calls that it answered.

    Raises:
        DAMAGES: It is no such record.
    """
    rest = dict(record)
    answered = [RequestId(client, number, bytes.fromhex(digest)) for client, number, digest in rest.pop("answered")]
    for value in values.values():
        for array in _arrays(value):
            array.flags.writeable = False
    converters = {
        "parts": lambda parts: value_of(RoundParts, parts, {}),
        "different_workers": lambda rows: tuple([DifferentWorker(*row) for row in rows]),
    }
    average = value_of(Average, {**rest, "values": values}, converters)
    return average, answered


def split(values: Mapping[str, Value]) -> tuple[list[Any], list[Array]]:
    """Returns the layout of values, in types that JSON has, and their arrays; the reverse of `joined`."""
    layout = [
        [name, None if not isinstance(value, SparseSlices) else {"dense_shape": value.dense_shape}]
        for name, value in values.items()
    ]
    return layout, [array for value in values.values() for array in _arrays(value)]


def joined(layout: list[Any], arrays: list[Array]) -> dict[str, Value]:
    """Returns values, given their layout and their arrays.

    Raises:
        ValueError, TypeError, KeyError: They do not belong together.
    """
    left = list(reversed(arrays))
    values: dict[str, Value] = {}
    for name, sparse in layout:
        if len(left) < (1 if sparse is None else 2):
            raise ValueError(f"expected more than {len(arrays)} arrays")
        if sparse is None:
            values[name] = left.pop()
        else:
            shape = sparse["dense_shape"]
            values[name] = SparseSlices(left.pop(), left.pop(), None if shape is None else tuple(shape))
    if left:
        raise ValueError(f"expected {len(arrays) - len(left)} arrays, got {len(arrays)}")
    return values


def _arrays(value: Value) -> list[Array]:
    return [value.indices, value.values] if isinstance(value, SparseSlices) else [value]
