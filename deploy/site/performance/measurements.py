"""The newest measurement of each comparison in benchmarks/results."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.site.places import ROOT

RESULTS = "benchmarks/results"


@dataclass(frozen=True)
class Contestant:
    """An implementation, and the seconds of a step: the median of the repetitions and their middle half."""

    label: str
    median: float
    lower: float
    upper: float

    @property
    def is_ours(self) -> bool:
        """True for gradserve, false for a peer."""
        return self.label.startswith("gradserve")


@dataclass(frozen=True)
class Measurement:
    """One comparison, as one run measured it.

    Attributes:
        title: What was measured.
        contestants: What was compared, the fastest first.
        file: The result file, relative to the repository.
        date: The day of the run.
        machine: Where it ran.
        repeats: The number of repetitions.
    """

    title: str
    contestants: tuple[Contestant, ...]
    file: str
    date: str
    machine: str
    repeats: int


def newest_measurements() -> tuple[Measurement, ...]:
    """Returns the newest measurement of each comparison with a peer, in the order in which they were first made."""
    newest: dict[str, Measurement] = {}
    for path in sorted((ROOT / RESULTS).glob("*.json")):
        newest.update((each.title, each) for each in _measurements(path))
    return tuple(newest.values())


def _measurements(path: Path) -> Iterator[Measurement]:
    content = json.loads(path.read_text())
    provenance = content["provenance"]
    for result in content["results"]:
        contestants = sorted(map(_contestant, _measured(result)), key=lambda each: each.median)
        if {each.is_ours for each in contestants} == {True, False}:
            yield Measurement(
                title=result["title"],
                contestants=tuple(contestants),
                file=f"{RESULTS}/{path.name}",
                date=provenance["date"][:10],
                machine=f"{provenance['cpu']}, {provenance['cores']} cores",
                repeats=content["repeats"],
            )


def _measured(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for contestant in result.get("contestants", ()):
        if contestant["seconds"] is not None:
            yield contestant


def _contestant(measured: dict[str, Any]) -> Contestant:
    seconds = measured["seconds"]
    return Contestant(measured["label"], seconds["median"], seconds["lower_quartile"], seconds["upper_quartile"])
