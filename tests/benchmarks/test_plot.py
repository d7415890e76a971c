from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness.verdicts import LimitVerdict, SpeedVerdict
from benchmarks.plot import draw, main

_SVG = "{http://www.w3.org/2000/svg}"
_TARGETS: list[dict[str, Any]] = [
    dict(verdict.to_json())
    for verdict in (
        SpeedVerdict("round <1>", "gradserve, bulk socket", "TensorFlow", 2.0, 4.0),
        SpeedVerdict("round <1>", "gradserve, gRPC streams", "TensorFlow", 2.0, 1.0),
        SpeedVerdict("round <1>", "gradserve, shared memory", "TensorFlow", 2.0, None),
        LimitVerdict("health", "gradserve, bulk socket", "ms", 50, 0.001),
    )
]


def _drawn(picture: str) -> tuple[list[str], list[tuple[float, float]]]:
    """The texts, and where each bar begins and how long it is."""
    root = ElementTree.fromstring(picture)
    bars = [
        (float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in root.iter(f"{_SVG}rect") if "x" in bar.attrib
    ]
    return [text.text or "" for text in root.iter(f"{_SVG}text")], bars


def test_bars_go_from_the_target_to_both_sides() -> None:
    texts, bars = _drawn(draw(_TARGETS, "a machine"))
    assert texts == [
        "target",
        "round <1>",
        "bulk socket, beside TensorFlow",
        "4.00x, target 2x",
        "gRPC streams, beside TensorFlow",
        "1.00x, target 2x",
        "health",
        "bulk socket",
        "0.001 ms, at most 50",
        "a machine",
    ]
    (reached, missed, far) = bars
    assert reached[0] == missed[0] + missed[1] == far[0]
    assert reached[1] == missed[1]
    assert 2.9 < far[1] / reached[1] < 3.1, "a bar that would leave the picture is cut at eight times the target"


def test_some_tables_of_a_result_file(tmp_path: Path) -> None:
    results, picture = tmp_path / "results.json", tmp_path / "picture.svg"
    provenance = {"date": "2026-11-22T12:00:00+00:00", "cpu": "a processor", "cores": 2}
    content = {"provenance": provenance, "results": [{"targets": _TARGETS[:3]}, {"targets": _TARGETS[3:]}]}
    results.write_text(json.dumps(content), encoding="utf-8")
    main([str(results), str(picture), "--titles", "health|put"])
    texts, bars = _drawn(picture.read_text(encoding="utf-8"))
    assert "health" in texts
    assert "round <1>" not in texts
    assert len(bars) == 1
    assert texts[-1].startswith("2026-11-22, a processor, 2 cores.")
