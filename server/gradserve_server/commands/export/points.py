"""The curves of an export: what there is to draw of a round and of an evaluation, by tag."""

from collections.abc import Iterator, Mapping

from gradserve_protocol.printing import visible
from gradserve_server.commands.export.rounds import Evaluation, Gradient, Round

ROUND, EVALUATION = "round", "evaluation"
"""The first words of the tags of all rounds, and of those of all evaluations."""


def points_of_round(described: Round) -> dict[str, float]:
    """Returns the values of a round by their tags, such as "round/seconds", "metrics/loss" and "norm/WORKER"."""
    late, missing = len(described.late), described.missing
    found: dict[str, float | None] = {
        f"{ROUND}/gradients": described.num_counted,
        f"{ROUND}/required": described.num_required,
        f"{ROUND}/late": late,
        f"{ROUND}/missing": None if missing is None else len(missing),
        f"{ROUND}/seconds": described.seconds,
        f"{ROUND}/step_seconds": described.step_seconds,
        f"{ROUND}/apply_seconds": described.apply_seconds,
        f"{ROUND}/learning_rate": described.learning_rate,
        **{f"metrics/{visible(name)}": value for name, value in described.metrics.items()},
    }
    for each in described.gradients:
        if each.worker_id:
            found |= _of_worker(each)
    return {tag: float(value) for tag, value in found.items() if value is not None}


def points_of_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Returns the values of an evaluation by their tags, such as "evaluation/loss"."""
    return {f"{EVALUATION}/{visible(name)}": value for name, value in evaluation.metrics.items()}


def _of_worker(gradient: Gradient) -> Mapping[str, float | None]:
    return dict(_by_worker(gradient, visible(gradient.worker_id)))


def _by_worker(gradient: Gradient, worker: str) -> Iterator[tuple[str, float | None]]:
    yield f"arrival_seconds/{worker}", gradient.after
    yield f"waited_seconds/{worker}", gradient.waited
    yield f"weight/{worker}", gradient.weight
    yield f"staleness/{worker}", gradient.staleness
    yield f"norm/{worker}", gradient.norm
    yield f"cosine/{worker}", gradient.cosine
    for name, value in gradient.metrics.items():
        yield f"worker_{visible(name)}/{worker}", value
