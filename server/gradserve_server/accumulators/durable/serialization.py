"""Ledgers, specs, averages and values as JSON records and arrays, and back."""

from dataclasses import asdict
from typing import Any

import numpy as np

from gradserve_server.accumulators.events import Record, contribution_of, contribution_record
from gradserve_server.accumulators.gradient import Array, Average, RoundParts, SparseSlices, Value
from gradserve_server.accumulators.identity import CallMemory, CallRecord, RequestId
from gradserve_server.accumulators.ledger import Answer, Ledger, Taken
from gradserve_server.accumulators.rounds import Applied, Members, Outcome, Round
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout, PartialShape, Piece, Reduction
from gradserve_server.storage.journal import Durability


def ledger_record(ledger: Ledger) -> Record:
    """Returns a ledger in types that JSON has; the reverse of `ledger_of`."""
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
        "clients": [
            [client_id, window.floor, [_call_row(sequence, call) for sequence, call in window.calls]]
            for client_id, window in ledger.calls.windows().items()
        ],
        "awaiting": [[each.client_id, each.sequence, each.fingerprint.hex()] for each in ledger.awaiting],
    }


def ledger_of(record: Record, calls: CallMemory[Answer]) -> Ledger:
    """Returns the ledger of a record.

    Args:
        record: The record.
        calls: An empty memory of calls, which it fills.

    Raises:
        ValueError, TypeError, KeyError: It is no such record.
    """
    ledger = Ledger(calls)
    rounds = ledger.rounds
    rounds.global_step = record["global_step"]
    rounds.epoch = record.get("epoch", 0)  # earlier servers had no epochs
    rounds.current = Round(record["round"])
    count, total_weight, num_nameless, workers = record["members"]
    held = [contribution_of(each) for each in record.get("held", ())]  # without sharded accumulators, there were none
    epoch = record.get("members_epoch")
    rounds.members = Members(count, total_weight, num_nameless, dict.fromkeys(workers), held, epoch)
    rounds.all_workers_known = record["all_workers_known"]
    rounds.expect(record["missing"])
    known = {rounds.current.number: rounds.current}
    for client_id, floor, rows in record["clients"]:
        calls.restore(client_id, floor, [_call_of(row, known) for row in rows])
    for client_id, sequence, fingerprint in record["awaiting"]:
        ledger.expect(RequestId(client_id, sequence, bytes.fromhex(fingerprint)))
    return ledger


def _call_row(sequence: int, call: CallRecord[Answer]) -> list[Any]:
    answer = call.record
    ended = None if answer.round is None else [answer.round.number, answer.round.step]
    row = [sequence, call.fingerprint.hex(), ended]
    if isinstance(answer, Applied):
        row += [answer.outcome.value, answer.global_step, answer.num_accumulated]
    return row


def _call_of(row: list[Any], known: dict[int, Round]) -> tuple[int, CallRecord[Answer]]:
    sequence, fingerprint, ended, *applied = row
    joined = None if ended is None else known.setdefault(ended[0], Round(*ended))
    answer: Answer
    if applied:
        outcome, global_step, num_accumulated = applied
        answer = Applied(Outcome(outcome), joined, global_step, num_accumulated)
    elif joined is None:
        raise ValueError(f"expected the round that call {sequence} took")
    else:
        answer = Taken(joined)
    return sequence, CallRecord(bytes.fromhex(fingerprint), answer)


_HOST = "cpu"


def spec_record(spec: AccumulatorSpec) -> Record:
    """Returns a spec in types that JSON has; the reverse of `spec_of`."""
    assert spec.durability is not None, "the registry has chosen one"
    return {
        "components": [
            {
                "name": each.name,
                "dtype": each.dtype.name,
                "shape": None if each.shape.dims is None else list(each.shape.dims),
                "layout": each.layout.value,
                "pieces": [list(piece) for piece in each.pieces],
            }
            for each in spec.components
        ],
        "reduction": spec.reduction.value,
        "accumulate_dtype": None if spec.accumulate_dtype is None else spec.accumulate_dtype.name,
        "deterministic": spec.deterministic,
        "keep_averages": spec.keep_averages,
        "one_per_worker": spec.one_per_worker,
        "refuse_non_finite": spec.refuse_non_finite,
        "durability": spec.durability.value,
        "device": spec.device,
        "agreement": dict(spec.agreement),
        "num_shards": spec.num_shards,
    }


def spec_of(record: Record) -> AccumulatorSpec:
    """Returns the spec of a record.

    Raises:
        ServiceError, ValueError, TypeError, KeyError: It is no such record.
    """
    return AccumulatorSpec(
        components=tuple(
            ComponentSpec(
                each["name"],
                np.dtype(each["dtype"]),
                PartialShape(None if each["shape"] is None else tuple(each["shape"])),
                Layout(each["layout"]),
                tuple(Piece(*piece) for piece in each.get("pieces", ())),
            )
            for each in record["components"]
        ),
        reduction=Reduction(record["reduction"]),
        accumulate_dtype=None if record["accumulate_dtype"] is None else np.dtype(record["accumulate_dtype"]),
        deterministic=record["deterministic"],
        keep_averages=record["keep_averages"],
        one_per_worker=record["one_per_worker"],
        refuse_non_finite=record["refuse_non_finite"],
        durability=Durability(record["durability"]),
        device=record.get("device", _HOST),  # servers that had no other place wrote none
        agreement=record.get("agreement", {}),  # nor did those that had no agreements
        num_shards=record.get("num_shards", 0),  # nor those that had no sharded accumulators
    )


def average_record(average: Average, answered: list[RequestId]) -> Record:
    """Returns an average without its values, and the calls that it answered; the reverse of `average_of`."""
    record = {name: value for name, value in vars(average).items() if name in _AVERAGE}
    if average.parts is not None:
        record["parts"] = {name: value for name, value in asdict(average.parts).items() if name != "sums" or value}
    return {**record, "answered": [[each.client_id, each.sequence, each.fingerprint.hex()] for each in answered]}


_AVERAGE = ("step", "round_number", "num_gradients", "total_weight", "worker_ids")


def average_of(record: Record, values: dict[str, Value]) -> tuple[Average, list[RequestId]]:
    """Returns the average of a record, and the calls that it answered.

    Raises:
        ServiceError, ValueError, TypeError, KeyError: It is no such record.
    """
    fields: dict[str, Any] = {name: record[name] for name in _AVERAGE}
    fields["worker_ids"] = tuple(fields["worker_ids"])
    if "parts" in record:
        parts: dict[str, Any] = record["parts"]
        lists = {name: tuple(value) for name, value in parts.items() if isinstance(value, list)}
        fields["parts"] = RoundParts(**{**parts, **lists})
    answered = [RequestId(client, sequence, bytes.fromhex(digest)) for client, sequence, digest in record["answered"]]
    for value in values.values():
        for array in _arrays(value):
            array.flags.writeable = False
    return Average(values=values, **fields), answered


def split(values: dict[str, Value]) -> tuple[list[Any], list[Array]]:
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
