"""`python -m benchmarks.plot RESULTS.json PICTURE.svg`: draws how far each target was reached."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _MARGIN, _ROW = 960, 16, 22
_LABELS = 400
"""The width of the column of labels."""
_FIGURES = 190
"""The width of the column of figures."""
_MOST_DOUBLINGS = 3.0
"""Bars end at eight times the target, and at an eighth of it."""
_REACHED, _MISSED, _GREY = "#2a7f5f", "#c2452d", "#666666"


def draw(targets: Iterable[Mapping[str, Any]], caption: str) -> str:
    """Returns an SVG picture of targets as result files have them; those that were not measured are left out."""
    measured = [target for target in targets if target["fraction_of_target"] is not None]
    groups = [(title, list(group)) for title, group in groupby(measured, key=lambda target: str(target["title"]))]
    rows: list[str | Mapping[str, Any]] = []
    for title, group in groups:
        rows += [title, *group]
    height = 2 * _MARGIN + (len(rows) + 2) * _ROW
    middle = _LABELS + (_WIDTH - _LABELS - _FIGURES) / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(middle, _MARGIN + 4, "target", _GREY, anchor="middle"),
    ]
    for i, row in enumerate(rows):
        y = _MARGIN + (i + 1) * _ROW
        lines += [_text(_MARGIN, y, row, "black", weight="bold")] if isinstance(row, str) else _bar(row, y, middle)
    bottom = height - _MARGIN - _ROW
    lines += [
        f'<line x1="{middle:.0f}" x2="{middle:.0f}" y1="{_MARGIN + 10}" y2="{bottom}" stroke="black"/>',
        _text(_MARGIN, height - _MARGIN, caption, _GREY),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bar(target: Mapping[str, Any], y: int, middle: float) -> Iterator[str]:
    fraction = float(target["fraction_of_target"])
    doublings = max(-_MOST_DOUBLINGS, min(math.log2(fraction), _MOST_DOUBLINGS))
    length = doublings / _MOST_DOUBLINGS * (middle - _LABELS)
    colour = _REACHED if fraction >= 1 else _MISSED
    yield _text(2 * _MARGIN, y, _label(target), "black")
    yield (
        f'<rect x="{min(middle, middle + length):.1f}" y="{y - 11}" width="{max(abs(length), 1):.1f}" '
        f'height="{_ROW - 8}" fill="{colour}"/>'
    )
    yield _text(_WIDTH - _MARGIN, y, _figures(target), colour, anchor="end")


def _label(target: Mapping[str, Any]) -> str:
    own = str(target["own"]).removeprefix("gradserve, ")
    return f"{own}, beside {target['peer']}" if target["kind"] == "speed" else own


def _figures(target: Mapping[str, Any]) -> str:
    if target["kind"] == "speed":
        return f"{target['measured']:.2f}x, target {target['target']:g}x"
    return f"{target['measured']:.4g} {target['unit']}, at most {target['limit']:g}"


def _text(x: float, y: float, text: str, colour: str, *, anchor: str = "start", weight: str = "normal") -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'


def _caption(provenance: Mapping[str, Any]) -> str:
    return (
        f"{provenance['date'][:10]}, {provenance['cpu']}, {provenance['cores']} cores. "
        "Bars: twice the target is a third of the way to the right, half of it a third to the left."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the targets of one result file, or of some of its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", type=Path, help="a result file")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--titles", default="", help="only tables whose titles begin with one of these, joined by |")
    parsed = parser.parse_args(arguments)
    content = json.loads(parsed.results.read_text(encoding="utf-8"))
    prefixes = tuple(parsed.titles.split("|"))
    targets = [
        target
        for result in content["results"]
        for target in result["targets"]
        if str(target["title"]).startswith(prefixes)
    ]
    parsed.picture.write_text(draw(targets, _caption(content["provenance"])), encoding="utf-8")


if __name__ == "__main__":
    main()
