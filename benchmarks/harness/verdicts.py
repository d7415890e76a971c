"""Targets, and whether they were reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Target:
    """A target: at least this many times as fast as a peer.

    Attributes:
        peer: The peer's name in the report.
        labels: The peer's contestants; the fastest of them counts.
        speed: The least speed, as a multiple of the peer's.
        own: The contestant of gradserve that has to reach it; None for the first one.
    """

    peer: str
    labels: tuple[str, ...]
    speed: float
    own: str | None = None


class Verdict(Protocol):
    """The judgement of one target."""

    def __str__(self) -> str:
        """Returns one line for the report."""
        ...

    def to_json(self) -> Mapping[str, Any]:
        """Returns it for the result file."""
        ...


@dataclass(frozen=True)
class BytesVerdict:
    """A target for fewer bytes over the links to servers.

    Attributes:
        title: What was compared.
        own: The contestant of gradserve.
        peer: The contestant with more bytes.
        target: The least number of times that the peer's are as many.
        measured: That number; None if one of them could not be measured.
    """

    title: str
    own: str
    peer: str
    target: float
    measured: float | None

    def __str__(self) -> str:
        what = f"{self.title}: bytes into the servers, {self.own}, {self.peer}: target >= {self.target:.2f}x fewer"
        if self.measured is None:
            return f"not measured: {what}"
        word = "reached" if self.measured >= self.target else "MISSED"
        return f"{word}: {what}, measured {self.measured:.2f}x"

    def to_json(self) -> Mapping[str, Any]:
        """Returns the fields, and how far the target was reached: 1 and more is reached."""
        reached = None if self.measured is None else self.measured / self.target
        return {"kind": "bytes", **vars(self), "fraction_of_target": reached}


@dataclass(frozen=True)
class SpeedVerdict:
    """A target for a speed, and the measured speed.

    Attributes:
        title: What was compared.
        own: The contestant of gradserve.
        peer: The peer's name.
        target: The least speed, as a multiple of the peer's.
        measured: The speed; None if gradserve or the peer could not be measured.
    """

    title: str
    own: str
    peer: str
    target: float
    measured: float | None

    def __str__(self) -> str:
        if self.measured is None:
            return f"not measured: {self.title}: {self.own}, {self.peer}: target >= {self.target:.2f}x"
        word = "reached" if self.measured >= self.target else "MISSED"
        speed = f"{self.measured:.2f}x the speed of {self.peer}"
        return f"{word}: {self.title}: {self.own}: {speed}, target >= {self.target:.2f}x"

    def to_json(self) -> Mapping[str, Any]:
        """Returns the fields, and how far the target was reached: 1 and more is reached."""
        reached = None if self.measured is None else self.measured / self.target
        return {"kind": "speed", **vars(self), "fraction_of_target": reached}


@dataclass(frozen=True)
class LimitVerdict:
    """A limit for a quantity, and the measured quantity.

    Attributes:
        title: What was measured.
        own: The contestant of gradserve.
        unit: The unit of both numbers.
        limit: The largest value that is good enough.
        measured: The value; None if it could not be measured.
    """

    title: str
    own: str
    unit: str
    limit: float
    measured: float | None

    def __str__(self) -> str:
        bound = f"target <= {self.limit:g} {self.unit}"
        if self.measured is None:
            return f"not measured: {self.title}: {self.own}: {bound}"
        word = "reached" if self.measured <= self.limit else "MISSED"
        return f"{word}: {self.title}: {self.own}: {self.measured:.4g} {self.unit}, {bound}"

    def to_json(self) -> Mapping[str, Any]:
        """Returns the fields, and how far the target was reached: 1 and more is reached."""
        reached = None if self.measured is None else self.limit / max(self.measured, 1e-9)
        return {"kind": "limit", **vars(self), "fraction_of_target": reached}
