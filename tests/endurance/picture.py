"""Pictures of what was measured over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP = 960, 150, 70, 40


@dataclass(frozen=True)
class Series:
    """What was measured over time.

    Attributes:
        title: What it is, with its unit.
        points: Times in seconds, and values.
    """

    title: str
    points: Sequence[tuple[float, float]]


def draw(caption: str, series: Sequence[Series], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Returns an SVG picture: one diagram for each series, and a line for each mark, with its text."""
    end = max((time for each in series for time, _ in each.points), default=1.0)
    height = _TOP + len(series) * (_HEIGHT + 40) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{escape(caption)}</text>',
    ]

    def x(time: float) -> float:
        return _LEFT + time / end * (_WIDTH - _LEFT - 20)

    for number, each in enumerate(series):
        top = _TOP + number * (_HEIGHT + 40) + 20
        most = max((value for _, value in each.points), default=0) or 1
        path = " ".join(f"{x(time):.1f},{top + _HEIGHT * (1 - value / most):.1f}" for time, value in each.points)
        lines += [
            f'<text x="{_LEFT}" y="{top - 6}" font-weight="bold">{escape(each.title)}</text>',
            f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.4g}</text>',
            f'<text x="{_LEFT - 6}" y="{top + _HEIGHT}" text-anchor="end">0</text>',
            f'<polyline points="{path}" fill="none" stroke="#2a7f5f" stroke-width="1.5"/>',
            f'<line x1="{_LEFT}" x2="{x(end):.0f}" y1="{top + _HEIGHT}" y2="{top + _HEIGHT}" stroke="black"/>',
        ]
        for time, text in marks:
            lines.append(
                f'<line x1="{x(time):.1f}" x2="{x(time):.1f}" y1="{top}" y2="{top + _HEIGHT}" stroke="#c2452d" '
                f'stroke-dasharray="3"><title>{escape(text)}</title></line>'
            )
    lines += [f'<text x="{_LEFT}" y="{height - 8}">{end:.0f} s</text>', "</svg>"]
    return "\n".join(lines) + "\n"


def rates(times: Sequence[float], width: float) -> list[tuple[float, float]]:
    """Returns how many events there were in each second, over intervals of a width."""
    if not times:
        return []
    edges = [width * number for number in range(int(max(times) / width) + 2)]
    return [(first, sum(first <= time < last for time in times) / width) for first, last in pairwise(edges)]
