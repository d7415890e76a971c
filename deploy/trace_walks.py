"""Prints the files that three calls enter, in order, on the client and on the server: an apply, an op, an upload.

python deploy/trace_walks.py

docs/architecture.md describes these walks.
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import gradserve
from gradserve_server.testing import LocalServer

ROOT = Path(__file__).parents[1]
SIDES = {"client": ROOT / "client" / "gradserve", "server": ROOT / "server" / "gradserve_server"}
_SETTLING_SECONDS = 0.5
"""The time for background work that a call leaves."""


class Walk:
    """Records the files entered in a block, in all threads that started after this object was made."""

    def __init__(self) -> None:
        """Starts tracing calls of functions."""
        self.files: dict[Path, None] = {}
        self._is_noting = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def of(self, call: Callable[[], object]) -> None:
        """Records the files that a call enters, after making the call once before."""
        call()
        time.sleep(_SETTLING_SECONDS)
        self.files.clear()
        self._is_noting = True
        call()
        self._is_noting = False

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_noting and event == "call" and not frame.f_code.co_name.startswith("<"):
            self.files.setdefault(Path(frame.f_code.co_filename))


def main() -> None:
    """Runs the three calls against a server in this process."""
    walk = Walk()
    with LocalServer() as server, gradserve.connect(server.address) as client:
        server.wait_until_prepared()
        accumulator = client.conditional_accumulator("float32", (3,))
        gradient, square = np.ones(3, np.float32), np.ones((2, 2), np.float32)
        weights: dict[str, Any] = {
            "w_ru": np.ones((4, 4), np.float32),
            "w_c": np.ones((4, 2), np.float32),
            "b_ru": np.ones(4, np.float32),
            "b_c": np.ones(2, np.float32),
        }
        calls: dict[str, Callable[[], object]] = {
            "apply_grad": lambda: accumulator.apply_grad(gradient),
            "GRUBlockCell": lambda: client.raw_ops.GRUBlockCell(x=square, h_prev=square, **weights),
            "put": lambda: client.put(gradient),
        }
        for name, call in calls.items():
            walk.of(call)
            for side, folder in SIDES.items():
                files = [file.relative_to(folder) for file in walk.files if folder in file.parents]
                sys.stdout.write(f"{name}, {side}: {len(files)} files\n")
                sys.stdout.writelines(f"    {file}\n" for file in files)


if __name__ == "__main__":
    main()
