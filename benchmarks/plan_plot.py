"""`python -m benchmarks.plan_plot RESULTS.json PICTURE.svg`: forecasts of `gradserve plan` beside measured rounds.

The results are those of the case "cluster".
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases.cluster import NUM_BYTES, NUM_SERVERS, NUM_WORKERS
from gradserve_server.commands.planning import Deployment, simulate

_SIZES = (1, 2, 4, 8, 16)
_WORKERS = (4, 16, 64)


def deployment_of(num_servers: int, title: str) -> Deployment:
    """Returns the deployment that a contestant of the case was, by its servers and the title of the comparison."""
    return Deployment(
        model_bytes=NUM_BYTES,
        num_workers=NUM_WORKERS,
        num_required=NUM_WORKERS,
        num_servers=num_servers,
        server_bandwidth=200e6 / 8,
        round_trip=0.04 if "40 ms" in title else 0.0,
    )


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draws forecasts as lines, and what was measured as points."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gradserve"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for number in _WORKERS:
        run = replace(deployment_of(1, ""), num_workers=number, num_required=number)
        seconds = [simulate(replace(run, num_servers=size)).round_seconds for size in _SIZES]
        axes.plot(_SIZES, seconds, marker=".", label=f"forecast, {number} workers")
    for result in results:
        points = {
            NUM_SERVERS[each["label"]]: each["seconds"]["median"]
            for each in result["contestants"]
            if each["label"] in NUM_SERVERS
        }
        axes.plot(list(points), list(points.values()), "o", fillstyle="none", markersize=9, label=_label(result))
    axes.set(xscale="log", yscale="log", xlabel="servers", ylabel="seconds a round", xticks=_SIZES)
    axes.set_xticklabels(map(str, _SIZES))
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def _label(result: dict[str, Any]) -> str:
    delay = " and 40 ms" if "40 ms" in result["title"] else ""
    return f"measured, 4 workers{delay}"


def main() -> None:
    """Draws what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_plot", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.results.read_text())["results"], arguments.picture)


if __name__ == "__main__":
    main()
