"""A comparison as a picture: a dot for each implementation on a logarithmic axis of time, with its middle half."""

import math
from collections.abc import Iterator
from html import escape

from deploy.site.performance.measurements import Contestant, Measurement

_AXIS, _RIGHT = 350, 76
_CHARACTER = 7.5  # the width of one, about
_ROW, _TOP, _BOTTOM = 24, 8, 34
_STEPS = (1, 2, 5)


def as_svg(measurement: Measurement) -> str:
    """Returns a picture of a comparison as SVG, in the colours of the page; its text says all numbers."""
    low = min(each.lower for each in measurement.contestants)
    high = max(each.upper for each in measurement.contestants)
    axis = _Axis(low, high, left=_CHARACTER * max(len(each.label) for each in measurement.contestants) + 10)
    bottom = _TOP + _ROW * len(measurement.contestants)
    lines = [
        f'<svg viewBox="0 0 {axis.left + _AXIS + _RIGHT:.0f} {bottom + _BOTTOM}" role="img" '
        f'aria-label="{escape(in_words(measurement))}">',
        *axis.lines(_TOP, bottom),
        *(
            line
            for row, each in enumerate(measurement.contestants)
            for line in _row(each, axis, _TOP + row * _ROW + _ROW / 2)
        ),
        "</svg>",
    ]
    return "\n".join(lines)


def in_words(measurement: Measurement) -> str:
    """Returns what the picture shows."""
    return f"{measurement.title}: " + ", ".join(
        f"{each.label} {_milliseconds(each.median)}" for each in measurement.contestants
    )


class _Axis:
    """A logarithmic axis of time, which begins at `left`."""

    def __init__(self, low: float, high: float, left: float) -> None:
        self.left = left
        self._low = math.log10(low) - 0.06
        self._high = max(math.log10(high) + 0.06, self._low + 0.4)
        self._ticks = [
            step * 10.0**power
            for power in range(math.floor(self._low), math.ceil(self._high) + 1)
            for step in _STEPS
            if self._low <= math.log10(step * 10.0**power) <= self._high
        ]

    def at(self, seconds: float) -> float:
        """Returns where a time is."""
        share = (math.log10(seconds) - self._low) / (self._high - self._low)
        return self.left + share * _AXIS

    def lines(self, top: float, bottom: float) -> Iterator[str]:
        for tick in self._ticks:
            x = f"{self.at(tick):.1f}"
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
            yield f'<text class="tick" x="{x}" y="{bottom + 18}" text-anchor="middle">{_milliseconds(tick)}</text>'


def _row(each: Contestant, axis: _Axis, y: float) -> Iterator[str]:
    kind = "ours" if each.is_ours else "peer"
    x = axis.at(each.median)
    beside = f'x="{axis.left - 10:.0f}" y="{y + 4}" text-anchor="end"'
    yield f'<text class="label {kind}" {beside}>{escape(each.label)}</text>'
    yield f'<line class="half {kind}" x1="{axis.at(each.lower):.1f}" x2="{axis.at(each.upper):.1f}" y1="{y}" y2="{y}"/>'
    yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="5"/>'
    yield f'<text class="value" x="{axis.at(each.upper) + 10:.1f}" y="{y + 4}">{_milliseconds(each.median)}</text>'


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
