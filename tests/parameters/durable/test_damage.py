"""Parameters whose records or values are damaged: servers name them, and `gradserve state` shows and removes them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradserve_server.commands.cli import cli
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.directory import DamagedError, StateDirectory, StateError
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.store import StateStore
from tests.parameters.bench import adam, push
from tests.parameters.durable.disk import Disk

OTHER = ResourceKey("test", "other")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Returns a directory with parameters "p" at step 3, with an update in the round, and others."""
    asyncio.run(fill(tmp_path / "state"))
    return tmp_path / "state"


async def fill(path: Path) -> None:
    disk = await Disk.open(path, Durability.GRADIENT)
    made = await disk.parameters(optimizer=adam(lr=0.5), rounds={"num_required": 2}, keep_versions=3)
    for number in range(7):
        await push(made, {"w": [number, 1]}, worker_id=f"w{number}", metrics=(("loss", 0.5 + number),))
    await disk.parameters(key=OTHER, optimizer=adam(lr=0.5))
    disk.close()


def execute(path: Path, statement: str) -> None:
    """Changes the database behind the server's back."""
    store = StateStore(StateDirectory(path))
    store._database.execute("PRAGMA foreign_keys = OFF")
    store._database.execute(statement)
    store.close()


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["state", *map(str, args)])


def begin(path: Path) -> None:
    """Starts a server."""

    async def begin_now() -> None:
        (await Disk.open(path, Durability.GRADIENT)).close()

    asyncio.run(begin_now())


LISTED = """\
parameters test/other: gradient, step 0, 0 updates in the round, 1 versions
parameters test/p: gradient, step 3, 1 updates in the round, 3 versions
"""


def test_what_is_whole_is_listed(path: Path) -> None:
    result = run("check", path)
    assert (result.exit_code, result.output) == (
        0,
        f"{LISTED}{path}: 0 accumulators, 0 layers, 2 parameters, nothing is damaged\n",
    )
    assert run("repair", path).output == f"{path}: nothing is damaged\n"


FIRST = "WHERE parameters = 1"
DAMAGES = {
    "their spec": ("UPDATE parameters SET spec = '{}' WHERE id = 1", "'updates'"),
    "their optimizer": (
        """UPDATE parameters SET spec = replace(spec, '"lr": 0.5', '"lr": -1') WHERE id = 1""",
        "lr",
    ),
    "their durability": (
        "UPDATE parameters SET spec = replace(spec, 'GRADIENT', 'NONE') WHERE id = 1",
        "their durability is NONE",
    ),
    "their lifetime": ("UPDATE parameters SET lifetime = '{\"more\": 3}' WHERE id = 1", "more"),
    "an event": (f'UPDATE parameters_event SET record = \'{{"event": "surprise"}}\' {FIRST}', "surprise"),
    "the end of a round": (f"DELETE FROM parameters_event {FIRST} AND position = 4", "expected a version of step"),
    "an update": (f"UPDATE parameters_update SET contribution = '{{\"height\": 1}}' {FIRST}", "height"),
    "an update that is gone": (
        f"DELETE FROM parameters_update {FIRST}",
        "expected 1 updates of the current round, got 0",
    ),
    "all versions": (f"DELETE FROM parameters_version {FIRST}", "there is no version"),
    "the newest version": (
        f"DELETE FROM parameters_version {FIRST} AND round = 3",
        "expected a version of step 3, got step 2 as the newest",
    ),
    "the names of the newest version": (
        f"UPDATE parameters_version SET names = '[[\"v\", null]]' {FIRST} AND round = 3",
        "expected every component, got none for",
    ),
    "the state": (f"DELETE FROM parameters_state {FIRST}", "the state of the optimizer is missing"),
    "the names in the state": (
        f"""UPDATE parameters_state SET record = replace(record, '["w"]', '[]') {FIRST}""",
        "expected 0 arrays of the optimizer's state, got 2",
    ),
    "the optimizer of the state": (
        f"UPDATE parameters_state SET record = '[]' {FIRST}",
        "list indices must be integers",
    ),
    "the record of the last round": (
        f"DELETE FROM parameters_round {FIRST} AND step = 3",
        "there is no record of the round that led to step 3",
    ),
    "a record in the middle": (
        f"DELETE FROM parameters_round {FIRST} AND step = 2",
        "the hash of the record of step 3 does not follow from the one before",
    ),
    "the weights in a record": (
        f"UPDATE parameters_round SET record = replace(record, '\"w4\", 1.0', '\"w4\", 2.0') {FIRST}",
        "the hash of the record of step 3 does not follow from the one before",
    ),
    "the metrics in a record": (
        f"UPDATE parameters_round SET record = replace(record, '\"loss\": 4.5', '\"loss\": 4.25') {FIRST}",
        "the hash of the record of step 3 does not follow from the one before",
    ),
    "metrics that are too few": (
        f"UPDATE parameters_round SET record = replace(record, '{{\"loss\": 4.5}}, ', '') {FIRST}",
        "zip() argument 2 is shorter than argument 1",
    ),
    "values that are those of another version": (
        "UPDATE parameters_version SET blob = "
        f"(SELECT blob FROM parameters_version {FIRST} AND round = 2) {FIRST} AND round = 3",
        "the values of step 3 are not those of the record of its round",
    ),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_parameters_are_named_and_removed(path: Path, what: str) -> None:
    statement, reason = DAMAGES[what]
    execute(path, statement)
    with pytest.raises(DamagedError, match="the record of parameters 'test/p' cannot be used: ") as raised:
        begin(path)
    assert reason in str(raised.value)
    result = run("check", path)
    assert (result.exit_code, reason in result.output) == (1, True), result.output
    assert "0 of 0 accumulators, 0 of 0 layers and 1 of 2 parameters are damaged" in result.output
    result = run("repair", path)
    assert (result.exit_code, "would remove parameters test/p: " in result.output) == (1, True), result.output
    result = run("repair", path, "--yes")
    assert (result.exit_code, result.output.startswith("remove parameters test/p: ")) == (0, True), result.output
    begin(path)
    result = run("check", path)
    assert result.output == (
        "parameters test/other: gradient, step 0, 0 updates in the round, 1 versions\n"
        f"{path}: 0 accumulators, 0 layers, 1 parameters, nothing is damaged\n"
    )


def damage_values(path: Path, table: str, choose: Callable[[list[int]], int]) -> None:
    """Changes a byte of the values of a row of the first parameters."""
    store = StateStore(StateDirectory(path))
    blobs = [blob for (blob,) in store.rows(f"SELECT blob FROM {table} {FIRST} ORDER BY blob")]
    extent = store._blobs[choose(blobs)].extents[0]
    store.close()
    with (path / "segments" / f"{extent.segment:06}.segment").open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"\xff")


def test_an_older_version_is_removed_alone(path: Path) -> None:
    damage_values(path, "parameters_version", min)
    with pytest.raises(StateError):
        begin(path)
    result = run("check", path)
    assert result.exit_code == 1
    assert "  version of round 1: " in result.output
    result = run("repair", path, "--yes")
    assert (result.exit_code, result.output.startswith("remove versions of parameters test/p: ")) == (0, True)
    begin(path)
    assert "parameters test/p: gradient, step 3, 1 updates in the round, 2 versions\n" in run("check", path).output


@pytest.mark.parametrize(
    ("table", "choose"),
    [("parameters_version", max), ("parameters_state", max), ("parameters_update", max)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_other_values_take_the_parameters_with_them(path: Path, table: str, choose: Callable[[list[int]], int]) -> None:
    damage_values(path, table, choose)
    with pytest.raises(StateError):
        begin(path)
    assert run("check", path).exit_code == 1
    assert run("repair", path, "--yes").output.startswith("remove parameters test/p: ")
    begin(path)
