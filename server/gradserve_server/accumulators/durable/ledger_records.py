"""Ledgers as records: what the events so far have led to."""

from typing import Any

from gradserve_server.accumulators.events import Record, contribution_of, contribution_record
from gradserve_server.accumulators.identity import CallMemory, CallRecord, RequestId
from gradserve_server.accumulators.ledger import Answer, Ledger, Taken
from gradserve_server.accumulators.results import Applied, Outcome
from gradserve_server.accumulators.rounds import Members, Round


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
