"""A user's script through every combination of a worker killed, one that joins, and a server that is started again."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradserve.testing import ServerProcess
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.torch.elastic_fleet import NUM_STEPS

FLAGS: dict[str, Callable[[Path], list[str]]] = {
    "in memory": lambda _: ["--warm-up", "false"],
    "durable": lambda folder: ["--warm-up", "false", "--state-dir", str(folder / "state")],
}
RATE_AT_THE_END = 0.05 * 0.1 * 0.1


class Fleet:
    """The workers of one run, which can be started, watched and killed by name."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._ids: dict[str, int] = {}

    def start(self, *names: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for name in names:
            print(name, file=self._process.stdin, flush=True)
            self._ids[name] = int(self._process.stdout.readline())

    def kill(self, name: str) -> None:
        os.kill(self._ids.pop(name), signal.SIGKILL)

    def wait_for_step(self, name: str, step: int) -> None:
        file = self._folder / f"{name}.step"
        seen = eventually(
            lambda: (int((file.exists() and file.read_text()) or 0), self._errors()),
            lambda seen: seen[0] >= step or "Traceback" in seen[1],
        )
        assert seen[0] >= step, seen[1]

    def _errors(self) -> str:
        return (self._folder / "errors").read_text()

    def results(self) -> dict[str, dict[str, Any]]:
        """Waits for all that were not killed, and returns the results by name."""
        self._process.communicate(timeout=PATIENCE_SECONDS)
        missing = [name for name in self._ids if not (self._folder / f"{name}.json").exists()]
        assert not missing, self._errors()
        return {name: json.loads((self._folder / f"{name}.json").read_text()) for name in self._ids}


@contextmanager
def fleet_of(address: str, folder: Path) -> Iterator[Fleet]:
    command = [sys.executable, "-m", "tests.torch.elastic_fleet", address, str(folder)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "GRADSERVE_RESTART_PATIENCE": str(PATIENCE_SECONDS)}
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):
        try:
            yield Fleet(process, folder)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("server", FLAGS)
@pytest.mark.parametrize(("kills", "joins", "restarts"), list(itertools.product([False, True], repeat=3))[1:])
def test_every_worker_ends_with_the_same_weights(
    tmp_path: Path, server: str, kills: bool, joins: bool, restarts: bool
) -> None:
    with (
        ServerProcess(tmp_path, *FLAGS[server](tmp_path)) as process,
        fleet_of(process.address, tmp_path) as fleet,
    ):
        fleet.start("a", "b", "c")
        fleet.wait_for_step("a", 10)
        if kills:
            fleet.kill("c")
        if joins:
            fleet.start("d")
        if restarts:
            process.restart()
        fleet.wait_for_step("a", 20)
        if joins and kills:
            fleet.start("c")  # again, in the place of the one that was killed
        results = fleet.results()
    assert {each["step"] for each in results.values()} == {NUM_STEPS}, results
    assert len({each["weights"] for each in results.values()}) == 1, results
    assert [each["rate"] for each in results.values()] == pytest.approx([RATE_AT_THE_END] * len(results))
