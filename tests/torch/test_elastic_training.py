"""A user's script while a worker is killed, one joins, and a server is started again: each two of these, and all."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradserve.testing import ServerProcess
from tests.torch import exact_fleet
from tests.torch.elastic_fleet import HELD_STEP, NUM_STEPS
from tests.torch.fleets import Fleet, running

FLAGS: dict[str, Callable[[Path], list[str]]] = {
    "in memory": lambda _: ["--warm-up", "false"],
    "durable": lambda folder: ["--warm-up", "false", "--state-dir", str(folder / "state")],
}
RATE_AT_THE_END = 0.05 * 0.1 * 0.1


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
