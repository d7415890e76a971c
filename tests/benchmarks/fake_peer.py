"""A contestant for tests: its workers do nothing, write down each command, and fail when told to."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.driver import Setup, Worker, run_worker


class FakeWorker(Worker):
    def __init__(self, setup: Setup) -> None:
        self._name = setup.options["name"]
        self._journal = setup.options["journal"]
        self._fault = setup.options.get("fault")

    def step(self) -> None:
        print("not an answer")  # noqa: T201
        self._write("step")
        if self._fault == "end":
            raise SystemExit("out of luck")
        time.sleep(0.001)

    def settle(self) -> None:
        self._write("settle")

    def check(self) -> None:
        self._write("check")
        assert self._fault != "wrong result", "wrong average"

    def report(self) -> dict[str, Any]:
        return {"seconds": [0.001 * (1 + i) for i in range(200)], "num_bytes": 1000}

    def _write(self, command: str) -> None:
        with open(self._journal, "a", encoding="utf-8") as journal:
            journal.write(f"{self._name} {command}\n")


if __name__ == "__main__":
    run_worker(FakeWorker, packages=["numpy"])
