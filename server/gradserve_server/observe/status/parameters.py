"""Snapshots of parameters: their rounds, their weights, and their optimizer and rules in words."""

from __future__ import annotations

from itertools import islice

from gradserve_protocol.server_status import ParametersStatus, WeightStatus
from gradserve_server.observe.status.snapshot import MOST_WORKERS, RoundsSnapshot, some_of
from gradserve_server.observe.updates import UpdateHistory
from gradserve_server.parameters.ledger import LOADED, WeightLedger
from gradserve_server.parameters.optimizers import name_of
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.round_rules import RoundRules
from gradserve_server.resources.registry import ResourceKey


def parameters_snapshot(
    key: ResourceKey, owner: str, parameters: Parameters, history: UpdateHistory
) -> RoundsSnapshot[ParametersStatus]:
    """Returns a snapshot of parameters with their history."""
    ledger, rounds = parameters.ledger, parameters.rounds
    participation = ledger.participation
    missing = list(islice(ledger.closer.missing, MOST_WORKERS))
    status = ParametersStatus(
        container=key.container,
        name=key.name,
        step=rounds.global_step,
        num_rounds=history.num_rounds,
        rounds_per_second=history.rounds_per_second,
        num_updates=rounds.num_accumulated,
        num_required=ledger.closer.rules.num_required,
        num_waiting=parameters.num_waiting,
        num_bytes=parameters.num_bytes,
        accepted=history.accepted,
        stale=history.stale,
        duplicate=history.duplicate,
        refused=history.refused,
        workers=some_of(rounds.members.workers),
        missing=tuple([each for each in missing if ledger.is_alive(each)]),
        gone=tuple([each for each in missing if not ledger.is_alive(each)]),
        optimizer=optimizer_text(ledger.round_rules.optimizer),
        learning_rate=parameters.learning_rate,
        rules=rules_text(ledger.round_rules.rounds),
        weights=weight_status(ledger.weights),
        num_counted=0 if participation is None else participation.num_counted,
        num_live=0 if participation is None else participation.num_live,
        num_ended=dict(history.reasons),
    )
    current = tuple(history.workers), tuple(history.times), tuple(history.staleness)
    return RoundsSnapshot(key, owner, status, rounds.global_step, tuple(history.rounds), *current)


def optimizer_text(optimizer: Optimizer) -> str:
    """Returns an optimizer in words: its name in the contract and the settings that are not 0."""
    settings = [
        f"{name}={value if isinstance(value, bool) else f'{value:g}'}"
        for name, value in vars(optimizer).items()
        if value
    ]
    return f"{name_of(optimizer)}({', '.join(settings)})"


def rules_text(rules: RoundRules) -> str:
    """Returns the rules for the end of a round in words."""
    parts = [f"{rules.num_required} update" + ("s" if rules.num_required != 1 else "")]
    if rules.grace == "adaptive":
        parts.append(f"adaptive grace up to {rules.max_grace:g} s")
    elif rules.grace:
        parts.append(f"grace {rules.grace:g} s")
    if rules.expected is not None:
        parts.append("expected: " + ("all live workers" if rules.expected == "alive" else f"{rules.expected}"))
    if rules.min_interval:
        parts.append(f"every {rules.min_interval:g} s at most")
    if rules.deadline is not None:
        parts.append(f"deadline {rules.deadline:g} s")
        if rules.min_required is not None:
            parts[-1] += f" with {rules.min_required}"
    return ", ".join(parts)


def weight_status(weights: WeightLedger) -> WeightStatus:
    """Returns a copy of where all weight went."""
    refused = {reason: weight for reason, weight in weights.refused.items() if reason != LOADED}
    return WeightStatus(weights.accepted, weights.applied, weights.pending, weights.dropped, refused)
