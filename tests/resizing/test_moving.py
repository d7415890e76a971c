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
from gradserve_ray.states.movable import Key, MovableResource
from gradserve_ray.states.moving import move_resources
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


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("after", [1, 3, 5])
def test_everything_moves_that_gets_another_home(folder: Path, after: int) -> None:
    before = {key: digest for each in contents(folder, 2) for key, digest in each.digests.items()}
    moves = move_resources(states(folder, max(2, after)), 2, after)
    homes = {name: (home_of("", name, 2), home_of("", name, after)) for name in NAMES}
    assert {move.key.name: (move.source, move.target) for move in moves} == {
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
    move_resources(states(folder, 3), 2, 3)
    settle(folder, 3, 3)
    assert contents(folder, 3) != [*before, Contents({}, 0)]
    move_resources(states(folder, 3), 3, 2)
    settle(folder, 2, 3)
    assert contents(folder, 3) == [*before, Contents({}, 0)]


class Faulty(MemberState):
    """A state directory that changes what is read from it, or takes nothing over after the first."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(path)
        self._fault = fault
        self._added = 0

    def read(self, key: Key) -> MovableResource:
        moved = super().read(key)
        if self._fault == "value":
            (first, *others) = moved.averages
            arrays = [array.copy() for array in first.arrays]
            arrays[0].reshape(-1)[0] += 1
            moved = replace(moved, averages=(replace(first, arrays=arrays), *others))
        if self._fault == "step":
            moved = replace(moved, events=moved.events[:-1])
        return moved

    def add(self, moved: MovableResource, spec: str | None = None, *, is_home: bool = True) -> None:
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
        move_resources(states(folder, 3), 2, 3)
        settle(folder, 3, 3)
        size, after, message = 3, 2, message.replace("server 2", r"server \d")
    before = contents(folder, 3)
    with pytest.raises(MoveError, match=message):
        move_resources([Faulty(folder / str(index), fault) for index in range(3)], size, after)
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
        move_resources(states(folder, 3), 2, 3)
        settle(folder, 3, 3)
        size, after = 3, 2
    with pytest.raises(Killed):
        move_resources([Interrupted(folder / str(index)) for index in range(3)], size, after)
    with pytest.raises(StateError, match=f"from {size} to {after} servers was interrupted: start .* with {size} serv"):
        settle(folder, after, 3)
    settle(folder, size, 3)
    with cluster(folder, size) as client:
        check(client)


def test_what_is_in_the_wrong_place_is_named(folder: Path) -> None:
    with pytest.raises(MoveError, match=r"server \d has accumulator 'default/net\d+', of which server \d is the home"):
        move_resources([MemberState(folder / "1"), MemberState(folder / "0"), MemberState(folder / "2")], 2, 3)
    with cluster(folder, 2) as client:
        check(client)


def test_a_server_that_goes_has_no_layers_and_one_that_comes_no_accumulators(folder: Path, tmp_path: Path) -> None:
    config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(folder / "1")))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        client.batch_norm(scope="bn", input_shape=(None, 3), dtype="float32")
    with pytest.raises(MoveError, match="server 1 has 1 batch normalization layers, which do not move"):
        move_resources(states(folder, 2), 2, 1)
    config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(folder / "2")))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        client.gradient_accumulator(GRADIENT, "old")
    with pytest.raises(MoveError, match="the state directory of server 2 has accumulator 'default/old' already"):
        move_resources(states(folder, 3), 2, 3)


PARAMETERS = [f"p{number}" for number in range(6)]


def parameters(client: gradserve.Client, name: str) -> gradserve.Parameters:
    return client.parameters(
        {"w": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float16)},
        name,
        optimizer=gradserve.optim.Adam(0.1),
        schedule=gradserve.optim.cosine(20),
        num_required=2,
        keep_versions=3,
        durability="gradient" if name in PARAMETERS[::2] else "round",
    )


def push(of: gradserve.Parameters, worker: str, step: int, number: int) -> gradserve.PushResult:
    update = {key: value * np.asarray(number + step + 1, value.dtype) for key, value in GRADIENT.items()}
    return of.push(update, step, weight=0.5 + number, worker_id=worker)


def train_parameters(client: gradserve.Client) -> None:
    """Three rounds of each; and where updates are durable at once, one of the next round."""
    for number, name in enumerate(PARAMETERS):
        trained = parameters(client, name)
        for step in range(3):
            push(trained, "a", step, number)
            push(trained, "b", step, number)
        if name in PARAMETERS[::2]:
            push(trained, "a", 3, number)


def seen_of(client: gradserve.Client, name: str) -> tuple[Any, ...]:
    found = parameters(client, name)
    info = found.info()
    versions = [
        (version.digest, version["w"].tobytes(), version["b"].tobytes()) for version in map(found.read, (1, 2, 3))
    ]
    return info.step, info.digest, info.num_updates, info.kept_steps, info.weights, versions, found.rounds()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("after", [1, 3])
def test_parameters_move_with_all_that_there_is_of_them(tmp_path: Path, after: int) -> None:
    """They go on as others do that have not moved, bit by bit."""
    count = max(2, after)
    (tmp_path / "undisturbed").mkdir()
    with cluster(tmp_path, 2) as client:
        train_parameters(client)
        before = {name: seen_of(client, name) for name in PARAMETERS}
    moves = move_resources(states(tmp_path, count), 2, after)
    homes = {name: (home_of("", name, 2), home_of("", name, after)) for name in PARAMETERS}
    changed = {name: home for name, home in homes.items() if home[0] != home[1]}
    assert changed
    assert {str(move.key): (move.source, move.target) for move in moves} == {
        f"parameters 'default/{name}'": home for name, home in changed.items()
    }
    with cluster(tmp_path, after) as moved, cluster(tmp_path / "undisturbed", 1) as undisturbed:
        assert {name: seen_of(moved, name) for name in PARAMETERS} == before
        train_parameters(undisturbed)
        for number, name in enumerate(PARAMETERS):
            here, there = parameters(moved, name), parameters(undisturbed, name)
            for step in (3, 4):
                for worker in ("a", "b"):
                    assert push(here, worker, step, number).outcome == push(there, worker, step, number).outcome
            assert here.read().digest == there.read().digest
    settle(tmp_path, after, count)
    left = [key for each in contents(tmp_path, count) for key in each.digests]
    assert sorted(key.name for key in left) == PARAMETERS, "each once"


def test_an_accumulator_and_parameters_of_one_name_move_both(tmp_path: Path) -> None:
    name = next(name for name in NAMES if home_of("", name, 2) != home_of("", name, 3))
    with cluster(tmp_path, 2) as client:
        net(client, name).push_pull(GRADIENT, 1, 0)
        for worker in ("a", "b"):
            push(parameters(client, name), worker, 0, 0)
    assert len(move_resources(states(tmp_path, 3), 2, 3)) == 2
    with cluster(tmp_path, 3) as client:
        assert net(client, name).info().global_step == 1
        assert parameters(client, name).info().step == 1


def test_values_that_are_damaged_on_disk_do_not_move(folder: Path) -> None:
    for segment in (folder / "0" / "segments").glob("*.segment"):
        data = bytearray(segment.read_bytes())
        data[:4096] = bytes(each ^ 0xFF for each in data[:4096])
        segment.write_bytes(data)
    with pytest.raises(MoveError, match="are damaged: their checksum differs"):
        move_resources(states(folder, 3), 2, 3)


def test_a_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    mark = ResizeMark("one", 2, 3, (Key("default", "a"),), (Key("c", "b/d", "parameters"),))
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


def test_what_moves_is_not_gone_and_keeps_its_rounds(folder: Path) -> None:
    move_resources(states(folder, 3), 2, 3)
    with cluster(folder, 3) as client:
        status = client.server_status(max_past_runs=256)
        assert status.past_runs == ()
        assert {len(each.rounds) for each in status.accumulators} <= {3, 4}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("accumulator", {"event", "ledger", "gradient", "average", "part", "accumulator_round"}),
        (
            "parameters",
            {f"parameters_{name}" for name in ("event", "ledger", "update", "version", "state", "round", "part")},
        ),
    ],
)
def test_every_table_moves(folder: Path, kind: str, expected: set[str]) -> None:
    """A new one has to be added to what moves."""
    with closing(sqlite3.connect(folder / "0" / "metadata.sqlite", isolation_level=None)) as database:
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({kind})")}
        tables = database.execute(f"SELECT name FROM sqlite_master WHERE sql LIKE '% {kind} INT%'").fetchall()
    assert columns == {"id", "container", "name", "owner", "incarnation", "durability", "spec", "lifetime"}
    assert {name for (name,) in tables} == expected
