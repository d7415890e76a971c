"""`python -m benchmarks.backups [--folder FOLDER]`: what calls wait for while backups of their server are taken.

One client pushes small updates at durability "gradient", each of which is on disk before its call returns, and asks
for the health of the server in between; in the second half, another one replaces a large model again and again. All of
it goes on without backups, while they are taken one after the other, and while plain files are written to the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gradserve
from gradserve_server.storage.backup import back_up, remove_backup
from gradserve_testing import ServerProcess

_SECONDS = 15.0
_MODEL_FLOATS = 16 << 20
_PIECE = 1 << 20


class Probe:
    """The seconds that calls take, in a thread of their own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_over = threading.Event()
        self.durable: list[float] = []
        self.health: list[float] = []

    def run(self) -> None:
        """Calls until `end`."""
        with gradserve.connect(self._address, timeout=60) as client:
            model = client.parameters(
                {"w": np.zeros(8, np.float32)},
                shared_name="small",
                optimizer=gradserve.optim.SGD(0.1),
                durability="gradient",
            )
            step = model.info().step
            while not self._is_over.is_set():
                began = time.perf_counter()
                step = model.push({"w": np.ones(8, np.float32)}, step).step
                pushed = time.perf_counter()
                client.server_info()
                self.durable.append(pushed - began)
                self.health.append(time.perf_counter() - pushed)
                step = model.info().step

    def measure(self, beside: Callable[[Callable[[], bool]], int]) -> str:
        """Calls while something else goes on; returns a line of figures.

        Args:
            beside: What goes on until the function that it gets returns False; returns how often.
        """
        thread = threading.Thread(target=self.run)
        thread.start()
        end = time.monotonic() + _SECONDS
        count = beside(lambda: time.monotonic() < end)
        self._is_over.set()
        thread.join()
        figures = []
        for each in (self.durable, self.health):
            ordered = sorted(each)
            figures += [ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]]
        return f"{count:>5}  {len(self.durable):>6}  " + "  ".join(f"{1e3 * each:7.1f}" for each in figures)


def replace_model(address: str, is_over: threading.Event) -> None:
    """Makes versions of a large model, each of which is on disk before its push returns."""
    with gradserve.connect(address, timeout=60) as client:
        zeros = np.zeros(_MODEL_FLOATS, np.float32)
        model = client.parameters({"w": zeros}, shared_name="large", optimizer=gradserve.optim.SGD(0.1))
        update, step = client.empty(zeros.shape, zeros.dtype), model.info().step
        update[:] = 1
        while not is_over.is_set():
            model.push({"w": update}, step)
            step += 1


def nothing(goes_on: Callable[[], bool]) -> int:
    """Waits."""
    while goes_on():
        time.sleep(0.1)
    return 0


def main() -> None:
    """Measures, and prints a table in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="folder on the disk to measure")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as name:
        folder = Path(name)

        def backups(goes_on: Callable[[], bool]) -> int:
            count = 0
            while goes_on():
                taken = back_up(folder / "state", folder / "backup")
                remove_backup(taken.path)
                count += 1
            return count

        def copies(goes_on: Callable[[], bool]) -> int:
            count, piece = 0, bytes(_PIECE)
            while goes_on():
                with (folder / "copy").open("wb", buffering=0) as file:
                    for _ in range(4 * _MODEL_FLOATS // _PIECE):
                        file.write(piece)
                (folder / "copy").unlink()
                count += 1
            return count

        print("              times   calls   durable push: median, 99 %, longest   server_info: median, 99 %, longest")
        for title, with_load in (("idle", False), ("loaded", True)):
            with ServerProcess(folder, "--state-dir", str(folder / "state")) as server:
                is_over = threading.Event()
                load = threading.Thread(target=replace_model, args=(server.address, is_over))
                if with_load:
                    load.start()
                for what, beside in (("alone", nothing), ("backups", backups), ("copies", copies)):
                    print(f"{title:>6} {what:<8}{Probe(server.address).measure(beside)}", flush=True)
                is_over.set()
                if with_load:
                    load.join()


if __name__ == "__main__":
    main()
