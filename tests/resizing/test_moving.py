"""Accumulators move between state directories, with all that there is of them, or not at all."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
from gradserve_protocol.placement import home_of
from gradserve_ray.states.mark import DecidedSize, ResizeMark, decide, holds
from gradserve_ray.states.member_state import Contents, MemberState, MoveError
from gradserve_ray.states.moving import move_accumulators
from gradserve_server.accumulators.durable.movable import Key, MovableAccumulator
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_server.storage.directory import StateError
from gradserve_testing import LocalServer
from tests.resizing.folders import cluster, contents, settle, states
from tests.servers.runtime import NOT_WARMED_UP

NAMES = [f"net{number}" for number in range(12)]
GRADIENT: dict[str, NDArray[Any]] = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1, 2], np.float16),
}


def net(client: gradserve.Client, name: str) -> gradserve.GradientAccumulator:
    durability = "gradient" if name in NAMES[::3] else "round"
    return client.gradient_accumulator(GRADIENT, name, durability=durability, keep_averages=2, one_per_worker=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """State directories of two servers: three rounds of each accumulator, and every third in the middle of a round."""
    with cluster(tmp_path, 2) as client:
        for number, name in enumerate(NAMES):
            acc = net(client, name)
            for step in range(3):
                scaled = {key: value * (number + step) for key, value in GRADIENT.items()}
                acc.push_pull(scaled, 1, step, worker_id="a")
        for name in NAMES[::3]:
            net(client, name).apply_grad(GRADIENT, 3, worker_id="a")
    return tmp_path


def check(client: gradserve.Client, *, in_middle: bool = True) -> None:
    """Checks that all is there, and goes on."""
    assert [each.name for each in client.list_accumulators()] == sorted(NAMES)
    for number, name in enumerate(NAMES):
        acc = net(client, name)
        info = acc.info()
        assert (info.global_step, info.kept_steps) == (3, (2, 3))
        for step in (2, 3):
            average = acc.read_average(step)
            np.testing.assert_array_equal(average["w"], GRADIENT["w"] * (number + step - 1))
        assert acc.num_accumulated() == (1 if name in NAMES[::3] and in_middle else 0)


@pytest.mark.parametrize("after", [1, 3, 5])
def test_everything_moves_that_gets_another_home(folder: Path, after: int) -> None:
    before = {key: digest for each in contents(folder, 2) for key, digest in each.digests.items()}
    moves = move_accumulators(states(folder, max(2, after)), 2, after)
    homes = {name: (home_of("", name, 2), home_of("", name, after)) for name in NAMES}
    assert {move.key[1]: (move.source, move.target) for move in moves} == {
        name: home for name, home in homes.items() if home[0] != home[1]
    }
    with cluster(folder, after) as client:
        check(client)
        for name in NAMES[::3]:  # the gradient that was there is in the sum, once
            acc = net(client, name)
            assert acc.apply_grad(GRADIENT, 3, worker_id="a").outcome is gradserve.Outcome.ALREADY_COUNTED
            acc.apply_grad({key: 3 * value for key, value in GRADIENT.items()}, 3, worker_id="b")
            np.testing.assert_array_equal(acc.take_grad(2)["w"], 2 * GRADIENT["w"])
    settle(folder, after, max(2, after))
    found = contents(folder, max(2, after))
    assert {key for each in found for key in each.digests} == before.keys()
    assert sum(len(each.digests) for each in found) == len(before)


def test_there_and_back(folder: Path) -> None:
    before = contents(folder, 2)
    move_accumulators(states(folder, 3), 2, 3)
    settle(folder, 3, 3)
    assert contents(folder, 3) != [*before, Contents({}, 0)]
    move_accumulators(states(folder, 3), 3, 2)
    settle(folder, 2, 3)
    assert contents(folder, 3) == [*before, Contents({}, 0)]


class Faulty(MemberState):
    """A state directory that changes what is read from it, or takes nothing over after the first."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(path)
        self._fault = fault
        self._added = 0

    def read(self, key: Key) -> MovableAccumulator:
        moved = super().read(key)
        if self._fault == "value":
            (first, *others) = moved.averages
            arrays = [array.copy() for array in first.arrays]
            arrays[0].reshape(-1)[0] += 1
            moved = replace(moved, averages=(replace(first, arrays=arrays), *others))
        if self._fault == "step":
            moved = replace(moved, events=moved.events[:-1])
        return moved

    def add(self, moved: MovableAccumulator, spec: str | None = None, *, is_home: bool = True) -> None:
        self._added += 1
        if self._fault == "disk" and self._added > 1:
            raise OSError("no space left")
        super().add(moved, spec, is_home=is_home)

    def decide(self, change: str, size: DecidedSize | None = None) -> None:
        if self._fault == "end":
            raise OSError("the node is gone")
        super().decide(change, size)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("value", r"accumulator 'default/net\d+' of server 2 is not what it was: its digest is \w{16}, and was \w{16}"),
        ("step", "is not what it was"),
        ("disk", "no space left"),
        ("end", "the node is gone"),
    ],
)
@pytest.mark.parametrize("shrinks", [False, True])
def test_a_fault_leaves_everything_as_it_was(folder: Path, fault: str, message: str, shrinks: bool) -> None:
    size, after = 2, 3
    if shrinks:
        move_accumulators(states(folder, 3), 2, 3)
        settle(folder, 3, 3)
        size, after, message = 3, 2, message.replace("server 2", r"server \d")
    before = contents(folder, 3)
    with pytest.raises(MoveError, match=message):
        move_accumulators([Faulty(folder / str(index), fault) for index in range(3)], size, after)
    assert contents(folder, 3) == before
    with cluster(folder, size) as client:
        check(client)


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_change_that_was_interrupted_is_cancelled_at_the_next_start(folder: Path, shrinks: bool) -> None:
    """Of a process that has ended in the middle, only marks and copies are left."""

    class Killed(BaseException):
        pass

    class Interrupted(MemberState):
        def cancel(self, change: str) -> None:
            raise OSError("nobody is there to do it")

        def decide(self, change: str, size: DecidedSize | None = None) -> None:
            raise Killed

    size, after = 2, 3
    if shrinks:
        move_accumulators(states(folder, 3), 2, 3)
        settle(folder, 3, 3)
        size, after = 3, 2
    with pytest.raises(Killed):
        move_accumulators([Interrupted(folder / str(index)) for index in range(3)], size, after)
    with pytest.raises(StateError, match=f"from {size} to {after} servers was interrupted: start .* with {size} serv"):
        settle(folder, after, 3)
    settle(folder, size, 3)
    with cluster(folder, size) as client:
        check(client)


def test_what_is_in_the_wrong_place_is_named(folder: Path) -> None:
    with pytest.raises(MoveError, match=r"accumulator 'default/net\d+' is on server \d, and belongs to server \d"):
        move_accumulators([MemberState(folder / "1"), MemberState(folder / "0"), MemberState(folder / "2")], 2, 3)
    with cluster(folder, 2) as client:
        check(client)


def test_a_server_that_goes_has_no_layers_and_one_that_comes_no_accumulators(folder: Path, tmp_path: Path) -> None:
    config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(folder / "1")))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        client.batch_norm(scope="bn", input_shape=(None, 3), dtype="float32")
    with pytest.raises(MoveError, match="server 1 has 1 batch normalization layers, which do not move"):
        move_accumulators(states(folder, 2), 2, 1)
    config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(folder / "2")))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        client.gradient_accumulator(GRADIENT, "old")
    with pytest.raises(MoveError, match="the state directory of server 2 has accumulator 'default/old' already"):
        move_accumulators(states(folder, 3), 2, 3)


def test_parameters_that_would_get_another_home_stop_the_change(folder: Path) -> None:
    with cluster(folder, 2) as client:
        for name in ("p0", "p1", "p2", "p3"):
            client.parameters({"w": np.zeros(2, np.float32)}, shared_name=name, durability="round")
    with pytest.raises(MoveError, match=r"parameters 'default/p\d' on server \d would belong to server \d"):
        move_accumulators(states(folder, 3), 2, 3)
    with cluster(folder, 2) as client:
        check(client)
        assert [client.delete_parameters(name) for name in ("p0", "p1", "p2", "p3")] == [True] * 4
    move_accumulators(states(folder, 3), 2, 3)


def test_values_that_are_damaged_on_disk_do_not_move(folder: Path) -> None:
    for segment in (folder / "0" / "segments").glob("*.segment"):
        data = bytearray(segment.read_bytes())
        data[:4096] = bytes(each ^ 0xFF for each in data[:4096])
        segment.write_bytes(data)
    with pytest.raises(MoveError, match="are damaged: their checksum differs"):
        move_accumulators(states(folder, 3), 2, 3)


def test_a_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    mark = ResizeMark("one", 2, 3, (("default", "a"),), (("c", "b/d"),))
    assert ResizeMark.read(tmp_path) is None
    mark.write(tmp_path)
    assert ResizeMark.read(tmp_path) == mark
    ResizeMark.remove(tmp_path)
    ResizeMark.remove(tmp_path)
    assert ResizeMark.read(tmp_path) is None


def test_what_was_decided_stays_so(tmp_path: Path) -> None:
    for change in ("one", "two"):
        assert not holds(tmp_path, change)
        decide(tmp_path, change)
    assert [holds(tmp_path, change) for change in ("one", "two", "three")] == [True, True, False]
    (tmp_path / "resized.json").write_text("{")
    with pytest.raises(StateError, match=r"resized.json: the file is damaged"):
        holds(tmp_path, "one")


def test_every_table_with_accumulators_moves(folder: Path) -> None:
    """A new one has to be added to what moves."""
    with closing(sqlite3.connect(folder / "0" / "metadata.sqlite", isolation_level=None)) as database:
        columns = {row[1] for row in database.execute("PRAGMA table_info(accumulator)")}
        tables = database.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%accumulator INT%'").fetchall()
    assert columns == {"id", "container", "name", "owner", "incarnation", "durability", "spec", "lifetime"}
    assert {name for (name,) in tables} == {"event", "ledger", "gradient", "average", "part"}
