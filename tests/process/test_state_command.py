"""`gradserve state`: directories that are whole, damaged, in use, or none."""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.config import RuntimeConfig, ServerConfig, StateConfig
from gradserve_server.storage.directory import StateError
from gradserve_testing import LocalServer
from tests.accumulators.durable.disk import Disk as AccumulatorDisk
from tests.layers.durable.disk import LayerDisk
from tests.servers.command_line import run_cli
from tests.together import together


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["state", *map(str, arguments)])


def config(directory: Path) -> ServerConfig:
    state = StateConfig(state_dir=str(directory), durability="gradient")
    return ServerConfig(state=state, runtime=RuntimeConfig(warm_up=False))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The state of a server that had two accumulators and a layer."""
    with LocalServer(config(tmp_path / "state")) as server, gradserve.connect(server.address) as client:
        plain = client.conditional_accumulator("bfloat16", (2, 3), shared_name="plain", keep_averages=2)
        for step in range(3):
            plain.apply_grad(np.full((2, 3), step, ml_dtypes.bfloat16), local_step=step)
            plain.take_grad(1)
        template = {"w": np.ones(1 << 20, np.float32), "b": gradserve.SparseSpec("float64")}
        rows = gradserve.IndexedSlices(np.ones((1, 2)), np.array([5]))
        model = client.gradient_accumulator(template, shared_name="model", container="c")
        model.apply_grad({"w": np.ones(1 << 20, np.float32), "b": rows})
        model.take_grad(1)
        model.apply_grad({"w": np.ones(1 << 20, np.float32), "b": rows}, local_step=1)
        layer = client.batch_norm(scope="bn", container="c", scale=True)
        layer.forward(np.ones((4, 3), np.float32))
        layer.run_updates()
        layer.forward(np.ones((4, 3), np.float32))
    return tmp_path / "state"


LISTED = """\
c/model: gradient, step 1, 1 gradients in the round, 1 averages
default/plain: gradient, step 3, 0 gradients in the round, 2 averages
layer c/bn: 4 variables, 1 updates, 1 pending
"""


def test_a_directory_that_is_whole(directory: Path) -> None:
    result = run("check", directory)
    assert (result.exit_code, result.output) == (
        0,
        f"{LISTED}{directory}: 2 accumulators, 1 layers, 0 parameters, nothing is damaged\n",
    )
    result = run("repair", directory)
    assert (result.exit_code, result.output) == (0, f"{directory}: nothing is damaged\n")


def test_the_newest_average(directory: Path, tmp_path: Path) -> None:
    result = run("export", directory, "plain", tmp_path / "a.npz")
    assert (result.exit_code, result.output) == (0, f'{tmp_path}/a.npz: "", step 3\n')
    with np.load(tmp_path / "a.npz") as saved:
        assert saved["average"].tolist() == [[2] * 3] * 2
        assert (saved["average"].dtype, saved[".step"], saved[".num_gradients"]) == (np.float32, 3, 1)
    assert run("export", directory, "model", tmp_path / "m.npz", "--container", "c").exit_code == 0
    with np.load(tmp_path / "m.npz") as saved:
        assert saved["w"].shape == (1 << 20,)
        assert (saved["b.indices"].tolist(), saved["b.values"].tolist()) == ([5], [[1, 1]])


def test_what_is_not_there(directory: Path, tmp_path: Path) -> None:
    result = run("export", directory, "model", tmp_path / "m.npz")
    assert (result.exit_code, result.output) == (
        1,
        f"Error: {directory}: there is no accumulator and no parameters 'default/model'\n",
    )
    result = run("export", directory, "plain", tmp_path / "nowhere" / "m.npz")
    assert result.exit_code == 1
    assert "No such file or directory" in result.output


class TestParameters:
    """`gradserve state export` of parameters."""

    VALUES: ClassVar = {"w": np.linspace(0, 1, 6, dtype=np.float32), "h": np.ones((2, 2), ml_dtypes.bfloat16)}

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        """Saves parameters at step 3 while their server runs, and returns the file."""
        with LocalServer(config(tmp_path / "state")) as server, gradserve.connect(server.address) as client:
            made = client.parameters(
                self.VALUES, shared_name="llm", container="c", optimizer=gradserve.optim.Adam(0.1), keep_versions=2
            )
            for step in range(3):
                made.push({"w": np.full(6, step + 1.0)}, step)
            made.change(optimizer=gradserve.optim.Adam(0.2), schedule=gradserve.optim.cosine(9), num_required=2)
            made.push({"h": np.ones((2, 2))}, 3)
            made.save(tmp_path / "saved")
            client.conditional_accumulator("float32", (), shared_name="llm", container="c")
        return tmp_path / "saved"

    def export(self, tmp_path: Path, *options: object) -> Result:
        return run("export", tmp_path / "state", "llm", tmp_path / "exported", "--container", "c", *options)

    def test_the_file_is_the_one_that_save_writes(self, saved: Path, tmp_path: Path) -> None:
        result = self.export(tmp_path, "--kind", "parameters")
        assert (result.exit_code, result.output.startswith(f"{tmp_path}/exported: step 3, ")) == (0, True)
        assert (tmp_path / "exported").read_bytes() == saved.read_bytes()
        with LocalServer(config(tmp_path / "state")) as server, gradserve.connect(server.address) as client:
            values = gradserve.load_parameters(tmp_path / "exported")
            assert client.parameters(values, shared_name="next").read().step == 3

    def test_an_older_version_has_no_state(self, saved: Path, tmp_path: Path) -> None:
        assert self.export(tmp_path, "--kind", "parameters", "--step", 2).exit_code == 0
        found = gradserve.load_parameters(tmp_path / "exported")
        assert (found.step, found.state, found.update) == (2, None, "delta")
        for step in (1, 4):
            result = self.export(tmp_path, "--kind", "parameters", "--step", step)
            assert (result.exit_code, "step" in result.output) == (1, True)

    def test_an_accumulator_of_the_same_name(self, saved: Path, tmp_path: Path) -> None:
        result = self.export(tmp_path)
        assert result.exit_code == 1
        assert "an accumulator and parameters are called 'c/llm': add --kind" in result.output
        assert not (tmp_path / "exported").exists()

    def test_one_that_is_damaged(self, saved: Path, tmp_path: Path) -> None:
        damage(tmp_path / "state", "SELECT blob FROM parameters_state")
        result = self.export(tmp_path, "--kind", "parameters")
        assert (result.exit_code, "parameters 'c/llm': " in result.output) == (1, True)
        assert not (tmp_path / "exported").exists()


@pytest.fixture
def in_use(directory: Path) -> Iterator[Path]:
    with LocalServer(config(directory)):
        yield directory


@pytest.mark.parametrize("command", ["check", "repair"])
def test_directories_that_are_refused(in_use: Path, tmp_path: Path, command: str) -> None:
    for path, reason in (
        (in_use, "another process uses this state directory"),
        (tmp_path / "none", "there is no state directory"),
        (tmp_path, "expected a state directory of gradserve, but it has 'state' and no 'gradserve-state'"),
    ):
        result = run(command, path)
        assert (result.exit_code, result.output) == (1, f"Error: {path}: {reason}\n")


def damage(directory: Path, query: str) -> None:
    """Changes a byte of a value."""
    with closing(sqlite3.connect(directory / "metadata.sqlite", isolation_level=None)) as connection:
        ((extents,),) = connection.execute(f"SELECT extents FROM blob WHERE id = ({query})").fetchall()
    offset = int(extents.split(",")[1])
    with (directory / "segments" / "000001.segment").open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")


def test_a_damaged_average_is_removed_alone(directory: Path) -> None:
    damage(directory, "SELECT blob FROM average WHERE round = 1")
    result = run("check", directory)
    assert result.exit_code == 1
    assert "average of round 1: " in result.output
    assert "their checksum differs" in result.output
    assert f"Error: {directory}: 1 of 2 accumulators, 0 of 1 layers and 0 of 0 parameters are damaged" in result.output
    result = run("repair", directory)
    assert result.exit_code == 1
    assert result.output.startswith("would remove averages of accumulator default/plain: average of round 1: ")
    assert run("repair", directory, "--yes").exit_code == 0
    assert run("check", directory).exit_code == 0
    with LocalServer(config(directory)) as server, gradserve.connect(server.address) as client:
        plain = client.conditional_accumulator("bfloat16", (2, 3), shared_name="plain", keep_averages=2)
        assert plain.info().kept_steps == (3,)


def test_an_accumulator_that_cannot_be_used_is_removed(directory: Path) -> None:
    damage(directory, "SELECT blob FROM gradient")
    assert "1 of 2 accumulators, 0 of 1 layers and 0 of 0 parameters are damaged" in run("check", directory).output
    result = run("repair", directory, "--yes")
    assert result.exit_code == 0
    assert result.output.startswith("remove accumulator c/model: ")
    result = run("check", directory)
    assert (result.exit_code, result.output.splitlines()[0]) == (0, LISTED.splitlines()[1])


@pytest.mark.parametrize("size", [None, 0, 5000, (4 << 20) + 1])
def test_a_segment_that_is_cut_off_or_gone(directory: Path, size: int | None) -> None:
    segment = directory / "segments" / "000001.segment"
    if size is None:
        segment.unlink()
    else:
        os.truncate(segment, size)
    assert run("check", directory).exit_code == 1
    assert run("repair", directory, "--yes").exit_code == 0
    result = run("check", directory)
    assert result.exit_code == 0, result.output
    with LocalServer(config(directory)) as server, gradserve.connect(server.address) as client:
        made = client.conditional_accumulator("float32", (1 << 20,), shared_name="new", container="c")
        made.apply_grad(np.ones(1 << 20, np.float32))
        assert made.take_grad(1)[-1] == 1
    result = run("check", directory)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("columns", ["extents = '[[1]]'", "arrays = 'x'", "extents = '[[1, 0, 4096]]'"])
def test_a_value_whose_place_is_damaged(directory: Path, columns: str) -> None:
    with closing(sqlite3.connect(directory / "metadata.sqlite", isolation_level=None)) as connection:
        connection.execute(f"UPDATE blob SET {columns} WHERE id = (SELECT blob FROM gradient)")
    assert "1 of 2 accumulators" in run("check", directory).output
    assert run("repair", directory, "--yes").exit_code == 0
    assert run("check", directory).exit_code == 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE layer SET config = '{}'",
        "UPDATE layer_event SET record = '[]'",
        "DELETE FROM layer_variable WHERE name = 'gamma'",
        "DELETE FROM layer_update",
        None,
    ],
)
def test_a_layer_that_is_damaged_is_removed(directory: Path, statement: str | None) -> None:
    if statement is None:
        damage(directory, "SELECT blob FROM layer_update")
    else:
        with closing(sqlite3.connect(directory / "metadata.sqlite", isolation_level=None)) as connection:
            connection.execute(statement)
    result = run("check", directory)
    assert result.exit_code == 1
    assert "layer c/bn\n" in result.output
    assert "0 of 2 accumulators, 1 of 1 layers and 0 of 0 parameters are damaged" in result.output
    result = run("repair", directory)
    assert result.exit_code == 1
    assert result.output.startswith("would remove layer c/bn: ")
    assert run("repair", directory, "--yes").exit_code == 0
    result = run("check", directory)
    assert result.output.endswith("2 accumulators, 0 layers, 0 parameters, nothing is damaged\n")


REFUSED = [
    'UPDATE accumulator SET lifetime = \'{"owner": "", "idle_lease": 9223372036854775807}\'',
    "UPDATE accumulator SET lifetime = '{\"owner\": 7}'",
    "UPDATE accumulator SET lifetime = '[]'",
    "UPDATE accumulator SET spec = json_set(spec, '$.durability', 'NONE')",
    "UPDATE accumulator SET spec = json_set(spec, '$.components[0].dtype', 'complex64')",
    "UPDATE event SET record = '[]'",
    "DELETE FROM event",
    "UPDATE gradient SET contribution = '7'",
    "UPDATE gradient SET contribution = json_set(contribution, '$.weigth', 1)",
    "UPDATE gradient SET names = '[]'",
    'UPDATE gradient SET names = \'[["w", null], ["x", null], ["b", null]]\'',
    "DELETE FROM gradient",
    "UPDATE average SET round = round + 7",
    "UPDATE average SET names = '[]'",
    f"UPDATE average SET record = '{'[' * 100_000}'",
    "INSERT INTO ledger SELECT id, 0, '{}' FROM accumulator",
    "UPDATE layer SET lifetime = '{\"idle_lease\": -1}'",
    "UPDATE layer_update SET implementation = 'none'",
    "UPDATE layer_variable SET place = 99",
    "UPDATE blob SET arrays = json_set(arrays, '$[0][1]', json('[4611686018427387904]'))",
    "UPDATE blob SET extents = json_set(extents, '$[0][1]', -4096)",
]
"""Changes of records with which no server starts."""


@pytest.fixture
def intact(directory: Path) -> Callable[[], None]:
    """Makes the records what they were."""
    kept = {path: path.read_bytes() for path in (directory / "metadata.sqlite", directory / "segments" / "commits")}

    def restore() -> None:
        for path, content in kept.items():
            path.write_bytes(content)

    return restore


async def start(directory: Path) -> None:
    """Makes everything again that is in a directory, as a server does at its start."""
    (await AccumulatorDisk.open(directory)).store.close()
    (await LayerDisk.open(directory)).store.close()


@together("statement", REFUSED)
def test_what_a_server_refuses_is_found_by_check_and_removed_by_repair(
    directory: Path, intact: Callable[[], None], statement: str
) -> None:
    intact()
    with closing(sqlite3.connect(directory / "metadata.sqlite", isolation_level=None)) as connection:
        connection.execute(statement)
    with suppress(StateError):
        asyncio.run(start(directory))
        raise AssertionError("a server starts")
    assert run("check", directory).exit_code == 1
    assert run("repair", directory, "--yes").exit_code == 0
    assert run("check", directory).exit_code == 0
    asyncio.run(start(directory))


def test_what_has_come_with_a_change_of_the_cluster_is_named_and_stays(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "metadata.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE accumulator SET container = '' WHERE name = 'plain'")
    with suppress(StateError):
        asyncio.run(start(directory))
        raise AssertionError("a server starts")
    assert run("repair", directory, "--yes").exit_code == 0
    result = run("check", directory)
    assert result.exit_code == 1
    assert (
        "1 accumulators or parameters have come here with a change of the number of servers that has not ended"
        in result.output
    )


def test_serve_names_the_option_of_a_state_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file, below = f"{tmp_path}/file", f"{tmp_path}/file/below"
    for flags, variables, message in (
        (("--state-dir", file), {}, f"--state-dir: {file}: expected a directory"),
        (("--state-dir", below), {}, f"--state-dir: cannot use the state directory {below}: not a directory"),
        (
            (),
            {"GRADSERVE_STATE_DIR": "/proc/x"},
            "GRADSERVE_STATE_DIR: cannot use the state directory /proc/x: no such file or directory",
        ),
    ):
        done = run_cli("serve", "--listen", "127.0.0.1:0", "--http-listen", "off", *flags, env=variables)
        assert (done.returncode, done.stderr) == (1, f"Error: {message}\n")
