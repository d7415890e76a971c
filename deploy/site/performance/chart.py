"""A comparison as a picture: a dot for each implementation on a logarithmic axis of time, with its middle half."""

import math
from collections.abc import Iterator
from html import escape

from deploy.site.performance.measurements import Contestant, Measurement

_WIDTH, _LEFT, _RIGHT = 400, 10, 66
_ROW, _TOP, _BOTTOM = 38, 4, 26
_STEPS = (1, 2, 5)


def as_svg(measurement: Measurement) -> str:
    """Returns a picture of a comparison as SVG, in the colours of the page; its text says all numbers."""
    low = min(each.lower for each in measurement.contestants)
    high = max(each.upper for each in measurement.contestants)
    axis = _Axis(low, high)
    bottom = _TOP + _ROW * len(measurement.contestants)
    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {bottom + _BOTTOM}" role="img" aria-label="{escape(in_words(measurement))}">',
        *axis.lines(_TOP, bottom),
        *(
            line
            for row, each in enumerate(measurement.contestants)
            for line in _row(each, axis, _TOP + row * _ROW + 14)
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
    """A logarithmic axis of time."""

    def __init__(self, low: float, high: float) -> None:
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
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def lines(self, top: float, bottom: float) -> Iterator[str]:
        for tick in self._ticks:
            x = f"{self.at(tick):.1f}"
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
            yield f'<text class="tick" x="{x}" y="{bottom + 18}" text-anchor="middle">{_milliseconds(tick)}</text>'


def _row(each: Contestant, axis: _Axis, y: float) -> Iterator[str]:
    """Yields the name of a contestant, and below it a dot where its median is."""
    kind = "ours" if each.is_ours else "peer"
    dot = y + 12
    yield f'<text class="label {kind}" x="0" y="{y}">{escape(each.label)}</text>'
    half = f'x1="{axis.at(each.lower):.1f}" x2="{axis.at(each.upper):.1f}" y1="{dot}" y2="{dot}"'
    yield f'<line class="half {kind}" {half}/>'
    yield f'<circle class="{kind}" cx="{axis.at(each.median):.1f}" cy="{dot}" r="4.5"/>'
    yield f'<text class="value" x="{axis.at(each.upper) + 10:.1f}" y="{dot + 4}">{_milliseconds(each.median)}</text>'


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
