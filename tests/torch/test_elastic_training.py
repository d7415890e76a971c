"""A user's script while a worker is killed, one joins, and a server is started again: each two of these, and all."""

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
from tests.torch import exact_fleet
from tests.torch.elastic_fleet import HELD_STEP, NUM_STEPS

FLAGS: dict[str, Callable[[Path], list[str]]] = {
    "in memory": lambda _: ["--warm-up", "false"],
    "durable": lambda folder: ["--warm-up", "false", "--state-dir", str(folder / "state")],
}
RATE_AT_THE_END = 0.05 * 0.1 * 0.1


class Fleet:
    """The workers of one run, which can be started, watched and killed by name."""

    def __init__(self, program: "subprocess.Popen[str]", address: str, folder: Path) -> None:
        self._program = program
        self._address = address
        self._folder = folder
        self._ids: dict[str, int] = {}

    def start(self, *names: str) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        for name in names:
            print(self._address, self._folder, name, file=self._program.stdin, flush=True)
            self._ids[name] = int(self._program.stdout.readline())

    def kill(self, name: str) -> None:
        os.kill(self._ids.pop(name), signal.SIGKILL)

    def wait_for_step(self, step: int) -> None:
        """Waits until a worker is at a step: not a certain one, which may wait for a state of those that are held."""
        self._wait_for("*.step", lambda texts: any(int(each or 0) >= step for each in texts))

    def release(self) -> None:
        """Lets the workers go on from HELD_STEP, at which they wait until then."""
        (self._folder / "go").touch()

    def results(self) -> dict[str, dict[str, Any]]:
        """Waits for all that were not killed, and returns the results by name."""
        for name in self._ids:
            self._wait_for(f"{name}.json", lambda texts: any(each.endswith("}") for each in texts))
        return {name: json.loads((self._folder / f"{name}.json").read_text()) for name in self._ids}

    def _wait_for(self, files: str, accept: Callable[[list[str]], bool]) -> None:
        seen, errors = eventually(
            lambda: (self._texts(files), self._texts("errors")),
            lambda seen: accept(seen[0]) or "Traceback" in "".join(seen[1]),
        )
        assert accept(seen), errors

    def _texts(self, files: str) -> list[str]:
        return [each.read_text() for each in self._folder.glob(files)]


@contextmanager
def running(module: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", module]
    environment = {**os.environ, "GRADSERVE_RESTART_PATIENCE": str(PATIENCE_SECONDS)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def program() -> Iterator["subprocess.Popen[str]"]:
    with running("tests.torch.elastic_fleet") as process:
        yield process


@pytest.mark.parametrize(
    ("server", "kills", "joins", "restarts"),
    [
        ("in memory", True, True, False),
        ("in memory", True, False, True),
        ("durable", False, True, True),
        ("durable", True, True, True),
    ],
)
def test_every_worker_ends_with_the_same_weights(
    tmp_path: Path, program: "subprocess.Popen[str]", server: str, kills: bool, joins: bool, restarts: bool
) -> None:
    with ServerProcess(tmp_path, *FLAGS[server](tmp_path)) as process:
        fleet = Fleet(program, process.address, tmp_path)
        fleet.start("a", "b", "c")
        fleet.wait_for_step(10)
        if kills:
            fleet.kill("c")
        if joins:
            fleet.start("d")
        if restarts:
            process.restart()
        fleet.release()
        fleet.wait_for_step(HELD_STEP + 10)
        if joins and kills:
            fleet.start("c")  # again, in the place of the one that was killed
        results = fleet.results()
    assert {each["step"] for each in results.values()} == {NUM_STEPS}, results
    assert len({each["weights"] for each in results.values()}) == 1, results
    assert [each["rate"] for each in results.values()] == pytest.approx([RATE_AT_THE_END] * len(results))


@pytest.fixture(scope="module")
def exact_program() -> Iterator["subprocess.Popen[str]"]:
    with running("tests.torch.exact_fleet") as process:
        yield process


@pytest.fixture(scope="module")
def undisturbed(exact_program: "subprocess.Popen[str]", tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of workers that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with ServerProcess(folder, *FLAGS["in memory"](folder)) as process:
        fleet = Fleet(exact_program, process.address, folder)
        fleet.start("a", "b", "c")
        fleet.release()
        results = fleet.results()
    assert results["a"] == results["b"] == results["c"]
    return results["a"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "step", "server", "restarts"),
    [
        ("a", 0, "durable", True),
        ("c", 0, "in memory", False),
        ("a", 10, "durable", True),
        ("c", 10, "in memory", False),
        ("a", exact_fleet.HELD_STEP, "in memory", False),
        ("c", exact_fleet.HELD_STEP, "durable", True),
        ("a", exact_fleet.HELD_STEP, "in memory", True),
    ],
)
def test_a_run_whose_rounds_need_all_workers_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path,
    exact_program: "subprocess.Popen[str]",
    undisturbed: dict[str, Any],
    victim: str,
    step: int,
    server: str,
    restarts: bool,
) -> None:
    with ServerProcess(tmp_path, *FLAGS[server](tmp_path)) as process:
        fleet = Fleet(exact_program, process.address, tmp_path)
        fleet.start(*sorted("abc", key=lambda name: name != victim))
        if step:
            fleet.wait_for_step(step)
        fleet.kill(victim)
        if restarts:
            process.restart()
        fleet.start(victim)
        fleet.release()
        results = fleet.results()
    assert results == dict.fromkeys("abc", undisturbed)
