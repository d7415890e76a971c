"""Records what Flower's robust strategies make of updates: writes flower_reductions.npz beside this file.

python -m venv /tmp/flower && /tmp/flower/bin/pip install flwr==1.42.0
/tmp/flower/bin/python -m tests.golden.make_flower_reductions
"""

import json
from pathlib import Path
from typing import Any

import flwr
import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate_krum
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum
from numpy.typing import NDArray

KRUM = ((7, 1, 1), (7, 2, 1), (7, 2, 3), (10, 3, 1), (10, 3, 7), (10, 0, 5), (11, 4, 2))
"""Updates, Byzantine ones among them, and selected ones."""
FRACTIONS = (0.0, 0.1, 0.2, 0.25, 0.3, 0.49)
SHAPES = ((5, 3), (7,), ())


def updates(count: int, dtype: str, offset: float = 0.0, spread: float = 1.0) -> list[list[NDArray[Any]]]:
    """Updates around a point at `offset`, of which the last two are far away."""
    rng = np.random.default_rng(count)
    made = []
    for number in range(count):
        noise = spread * (30 if number >= count - 2 else 1)
        made.append([np.asarray(offset + noise * rng.standard_normal(shape), dtype) for shape in SHAPES])
    return made


def selected(layers: list[list[NDArray[Any]]], num_byzantine: int, num_selected: int) -> list[int]:
    contents = [
        RecordDict({"arrays": ArrayRecord({str(i): Array(layer) for i, layer in enumerate(each)})}) for each in layers
    ]
    chosen = select_multikrum(contents, num_byzantine, num_selected)
    return sorted(next(i for i, content in enumerate(contents) if content is each) for each in chosen)


def main() -> None:
    arrays: dict[str, NDArray[Any]] = {}
    about: dict[str, Any] = {"flwr": flwr.__version__, "numpy": np.__version__, "selected": {}}
    for dtype in ("float32", "float64"):
        for count in (7, 10, 11):
            layers = updates(count, dtype)
            for index, layer in enumerate(zip(*layers, strict=True)):
                stacked = np.stack(layer)
                arrays[f"{dtype}-{count}-{index}"] = stacked
                arrays[f"{dtype}-{count}-{index}-median"] = np.median(stacked, axis=0)  # as in fedmedian.py
                for fraction in FRACTIONS:
                    arrays[f"{dtype}-{count}-{index}-trimmed-{fraction}"] = np.asarray(trim_mean(stacked, fraction))
        for count, num_byzantine, num_selected in KRUM:
            name = f"{dtype}-{count}-krum-{num_byzantine}-{num_selected}"
            layers = updates(count, dtype)
            about["selected"][name] = selected(layers, num_byzantine, num_selected)
            examples = [1 + number % 3 for number in range(count)]
            older = aggregate_krum(list(zip(layers, examples, strict=True)), num_byzantine, num_selected)
            for index, layer in enumerate(older):
                arrays[f"{name}-{index}"] = np.asarray(layer)
    # All distances are small differences of large numbers.
    for index, layer in enumerate(zip(*updates(10, "float32", 1000.0, 0.001), strict=True)):
        arrays[f"offset-{index}"] = np.stack(layer)
    about["selected"]["offset"] = selected(updates(10, "float32", 1000.0, 0.001), 3, 5)
    path = Path(__file__).with_name("flower_reductions.npz")
    np.savez_compressed(path, manifest=json.dumps(about), **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
