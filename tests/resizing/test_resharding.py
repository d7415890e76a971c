"""Sharded accumulators get other servers: with all that there is of them, or not at all."""

import json
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import gradserve
from gradserve.calls.client import state as client_state
from gradserve_protocol.placement import home_of
from gradserve_ray.states.mark import DecidedSize, ResizeMark
from gradserve_ray.states.member_state import AnnouncementError, MemberState, MoveError, UnknownOutcomeError
from gradserve_ray.states.movable import Key, Slices
from gradserve_ray.states.moving import Move, move_resources
from gradserve_ray.states.shards import Division
from gradserve_server.accumulators.gradient import SparseSlices
from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.records import spec_of
from gradserve_server.storage import journal
from gradserve_server.storage.directory import StateError
from tests.cluster.sharding.clients import MODEL, all_sharded, gradient, same
from tests.resizing.folders import cluster, contents, settle, states
from tests.storage.copies import copy_state

ALWAYS, NEVER = 3, 1 << 30
SIZES = [(2, 3, NEVER), (3, 2, ALWAYS), (2, 4, ALWAYS), (2, 1, NEVER)]
"""The numbers of servers before and after, and of the events after which they are replaced by what they led to."""
COMPONENTS: Mapping[str, Mapping[str, Any]] = {
    "model": MODEL,
    "tables": {"t": gradserve.SparseSpec("float32", (-1, 2)), "u": gradserve.SparseSpec("float64", (9, 1))},
    "scalar": {"s": gradserve.DenseSpec("float32", ())},  # One server has it, and all others nothing.
}
FIRST_ID = 1 << 40
HOUR = 3_600_000_000_000
Averages = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(autouse=True)
def _sharded() -> Iterator[None]:
    with all_sharded():
        yield


def name_of(kind: str, before: int, after: int, *, moves: bool) -> str:
    """Returns a name of an accumulator whose home changes, or does not."""
    found = (f"{kind}{number}" for number in range(1000))
    return next(name for name in found if (home_of("", name, before) != home_of("", name, after)) is moves)


def names(before: int, after: int) -> dict[str, str]:
    """Returns the names of the accumulators, with the kind of each."""
    moving = {name_of(kind, before, after, moves=True): kind for kind in ("model", "scalar")}
    return moving | {name_of(kind, before, after, moves=False): kind for kind in COMPONENTS}


def values_of(kind: str, number: float) -> dict[str, Any]:
    """Returns a gradient whose elements grow with a number."""
    if kind == "model":
        return gradient(number)
    if kind == "scalar":
        return {"s": np.float32(number)}
    rows = {"t": np.full((1, 2), number, np.float32), "u": np.full((1, 1), number)}
    return {name: gradserve.IndexedSlices(value, np.array([int(number) % 9])) for name, value in rows.items()}


def opened(client: gradserve.Client, name: str, kind: str) -> gradserve.GradientAccumulator:
    """Opens an accumulator, which is sharded if there are several servers."""
    return client.gradient_accumulator(COMPONENTS[kind], name, keep_averages=2, one_per_worker=True)


@contextmanager
def same_client(client: gradserve.Client) -> Iterator[gradserve.Client]:
    """Connects as a client with one id, however often; it may make its calls again."""
    ids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="5" * 32))
    with patch.object(client_state, "uuid", ids), gradserve.connect(client.address.split(",")) as connected:
        yield connected


def train(client: gradserve.Client, accumulators: Mapping[str, str]) -> None:
    """Ends three rounds of each accumulator."""
    with same_client(client) as sender:
        for name, kind in accumulators.items():
            acc = opened(sender, name, kind)
            acc.apply_grad(values_of(kind, 1), 0, worker_id="a", request_id=FIRST_ID)
            acc.apply_grad(values_of(kind, 3), 0, worker_id="b", request_id=FIRST_ID + 1)
            acc.take_grad(2, request_id=FIRST_ID + 2)
            acc.push_pull(values_of(kind, 4), 1, 1, worker_id="a", request_id=FIRST_ID + 3)
            acc.apply_grad(values_of(kind, 1), 2, worker_id="a", request_id=FIRST_ID + 4)
            acc.apply_grad(values_of(kind, 6), 2, worker_id="b", request_id=FIRST_ID + 5)
            acc.take_grad(2, request_id=FIRST_ID + 6)
            late = acc.apply_grad(values_of(kind, 9), 1, worker_id="late", request_id=FIRST_ID + 7)
            assert late.outcome is gradserve.STALE  # It is held, and no round needs it.


def averages(client: gradserve.Client, accumulators: Mapping[str, str]) -> Averages:
    """Returns the kept averages."""
    found: Averages = {}
    for name, kind in accumulators.items():
        acc = opened(client, name, kind)
        for step in acc.info().kept_steps:
            found[name, step] = dict(acc.read_average(step))
    return found


def check_same(found: Averages, expected: Averages) -> None:
    assert found.keys() == expected.keys()
    for place, values in expected.items():
        for name, value in values.items():
            same(found[place][name], value)


def repeat(client: gradserve.Client, accumulators: Mapping[str, str], expected: Averages) -> None:
    """Makes calls again, which have their first answers."""
    with same_client(client) as sender:
        for name, kind in accumulators.items():
            acc = opened(sender, name, kind)
            again = acc.apply_grad(values_of(kind, 1), 2, worker_id="a", request_id=FIRST_ID + 4)
            assert (again.duplicate, again.outcome) == (True, gradserve.ACCEPTED)
            taken = acc.take_grad(2, request_id=FIRST_ID + 6)
            check_same({(name, 3): dict(taken)}, {(name, 3): expected[name, 3]})


def everything(folder: Path, count: int) -> list[Any]:
    """Returns all that there is in state directories, with digests."""
    found: list[Any] = []
    for index, state in enumerate(states(folder, count)):
        there = state.contents()
        parts = {}
        for key, sharded in there.sharded.items():
            held = Division(spec_of(json.loads(sharded.spec))).rows.get(index, {})
            parts[key] = state.part_digests(key, list(sharded.parts), held, {}, incoming=False)
        found.append((there, parts, state.contents(incoming=True)))
    return found


def change(folder: Path, statement: str, *values: Any) -> int:
    """Changes the database of a state directory; returns the number of rows that this concerns."""
    with closing(sqlite3.connect(folder / "metadata.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA foreign_keys = ON")
        count = database.execute(statement, values).rowcount
    database.close()
    return count


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State directories of two servers, for changes to three. To be copied."""
    folder = tmp_path_factory.mktemp("trained")
    with all_sharded(), cluster(folder, 2) as client:
        train(client, {name: kind for name, kind in names(2, 3).items() if kind != "tables"})
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """State directories of two servers."""
    return copy_state(trained, tmp_path / "states")


MOVING = name_of("model", 2, 3, moves=True)


@pytest.mark.parametrize(("before", "after", "most_events"), SIZES)
def test_runs_go_on(tmp_path: Path, before: int, after: int, most_events: int) -> None:
    """With the step, the averages bit for bit, and all calls counting once."""
    count, accumulators = max(before, after), names(before, after)
    with patch.object(journal, "MOST_EVENTS", most_events), cluster(tmp_path, before) as client:
        train(client, accumulators)
        expected = averages(client, accumulators)
        assert {opened(client, name, kind).info().num_shards for name, kind in accumulators.items()} == {before}
    moves = move_resources(states(tmp_path, count), before, after)
    shards = 0 if after == 1 else after
    assert {each.key.name: each for each in moves} == {
        name: Move(Key("default", name), home_of("", name, before), home_of("", name, after), shards)
        for name in accumulators
    }
    if shards:
        assert {str(each) for each in moves} == {f"sharded over {shards} servers"}
    else:
        assert {str(each) for each in moves} == {"server 1 to 0", "as a whole on server 0"}
    settle(tmp_path, after, count)
    left = everything(tmp_path, count)
    assert all(not there.digests for there, _, _ in left[after:])
    with cluster(tmp_path, after) as client:
        check_same(averages(client, accumulators), expected)
        repeat(client, accumulators, expected)
        for name, kind in accumulators.items():
            acc = opened(client, name, kind)
            assert (acc.info().global_step, acc.info().num_shards) == (3, shards)
            acc.apply_grad(values_of(kind, 2), 3, worker_id="a")
            expected[name, 4] = dict(acc.push_pull(values_of(kind, 2), 2, 3, worker_id="b"))
            del expected[name, 2]
            for component, value in values_of(kind, 2).items():
                same(expected[name, 4][component], value)
    with cluster(tmp_path, after) as client:
        check_same(averages(client, accumulators), expected)


def test_rounds_that_are_open_go_on(tmp_path: Path) -> None:
    """Where nobody holds rounds before: at durability "gradient", gradients are on disk."""
    accumulators = {name_of("model", 2, size, moves=True): size for size in (3, 1)}
    with cluster(tmp_path, 2) as client:
        for name in accumulators:
            acc = client.gradient_accumulator(MODEL, name, durability="gradient", one_per_worker=True)
            acc.apply_grad(gradient(1), 0, worker_id="a")
    before = 2
    for name, after in accumulators.items():
        move_resources(states(tmp_path, 3), before, after)
        settle(tmp_path, after, 3)
        with cluster(tmp_path, after) as client:
            acc = client.gradient_accumulator(MODEL, name, durability="gradient", one_per_worker=True)
            again = acc.apply_grad(gradient(1), 0, worker_id="a")
            assert again.outcome is gradserve.Outcome.ALREADY_COUNTED
            same(acc.push_pull(gradient(3), 2, 0, worker_id="b")["kernel"], gradient(2)["kernel"])
        before = after


def test_there_and_back(folder: Path) -> None:
    move_resources(states(folder, 3), 2, 3)
    settle(folder, 3, 3)
    before = everything(folder, 3)
    for size, other in ((3, 2), (2, 3)):
        move_resources(states(folder, 3), size, other)
        settle(folder, other, 3)
        assert (everything(folder, 3) == before) is (other == 3)


class KilledError(BaseException):
    """The end of the process that makes a change."""


class Moment:
    """The moment at which that process ends: before it does something for a certain time, from 0."""

    def __init__(self, what: str, time: int = 0) -> None:
        self._left = {what: time}
        self._has_come = False

    def come(self, what: str) -> None:
        """Ends the process if it is its time; then it does nothing more."""
        self._left[what] = left = self._left.get(what, 1 << 62) - 1
        self._has_come = self._has_come or left < 0
        if self._has_come:
            raise KilledError


class Mortal(MemberState):
    """A state directory that a process changes until a moment."""

    def __init__(self, path: Path, first: MemberState, moment: Moment) -> None:
        super().__init__(path, first.holds)
        self._moment = moment

    def begin(self, *args: Any) -> None:
        self._moment.come("begin")
        super().begin(*args)

    def add(self, *args: Any, **kwargs: Any) -> None:
        self._moment.come("add")
        super().add(*args, **kwargs)

    def add_parts(self, *args: Any) -> None:
        self._moment.come("add parts")
        super().add_parts(*args)

    def decide(self, *args: Any) -> None:
        self._moment.come("decide")
        super().decide(*args)

    def cancel(self, *args: Any) -> None:
        self._moment.come("cancel")
        super().cancel(*args)


MOMENTS = [
    (Moment("begin"), False),
    (Moment("begin", 1), False),
    (Moment("add"), False),
    (Moment("add", 4), False),
    (Moment("add parts"), False),
    (Moment("add parts", 4), False),
    (Moment("decide"), False),
    (Moment("announce"), True),
]


@pytest.mark.parametrize(("moment", "holds"), MOMENTS)
def test_an_interrupted_change_is_as_before_or_as_after(folder: Path, moment: Moment, holds: bool) -> None:
    """Whatever it has left in whichever server, as server 0 alone decides; another size is refused."""
    expected = everything(folder, 2)
    if holds:
        undisturbed = copy_state(folder, folder.with_name("undisturbed"))
        move_resources(states(undisturbed, 3), 2, 3)
        settle(undisturbed, 3, 3)
        expected = everything(undisturbed, 3)
    first = MemberState(folder / "0")
    mortal = [Mortal(folder / str(index), first, moment) for index in range(3)]
    with pytest.raises(KilledError):
        move_resources(mortal, 2, 3, lambda: moment.come("announce"))
    size, other, why = (3, 2, "was decided") if holds else (2, 3, "was interrupted")
    for each in states(folder, 3):
        if ResizeMark.read(each.path) is not None:
            with pytest.raises(StateError, match=f"from 2 to 3 servers {why}: start the cluster with {size} servers"):
                each.settle(other)
    for each in states(folder, 3)[::-1]:
        # What ends it may itself be interrupted, at its end.
        with patch.object(ResizeMark, "remove", side_effect=KilledError), suppress(KilledError):
            each.settle(size)
        each.settle(size)
    found = everything(folder, 3)
    assert found[: len(expected)] == expected
    assert all(not there.digests for there, _, _ in found[len(expected) :])


def test_what_was_decided_holds_whoever_could_not_be_told(folder: Path) -> None:
    """A reply that is late does not mean that nobody has acted upon it."""
    before = everything(folder, 3)

    def announce() -> None:
        raise OSError("nobody hears it")

    with pytest.raises(AnnouncementError, match="the cluster has 3 servers now, but: nobody hears it"):
        move_resources(states(folder, 3), 2, 3, announce, DecidedSize("life", 1, 3))
    first = MemberState(folder / "0")
    assert first.decided_size("life") == DecidedSize("life", 1, 3)
    assert first.decided_size("another life") is None
    with pytest.raises(StateError, match="from 2 to 3 servers was decided: start the cluster with 3 servers"):
        first.settle(2)
    settle(folder, 3, 3)
    assert everything(folder, 3) != before
    assert contents(folder, 3)[2].digests


@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("is_reached", [False, True])
def test_server_0_is_asked_whether_a_decision_holds_whose_reply_was_lost(
    folder: Path, is_decided: bool, is_reached: bool
) -> None:
    class Late(MemberState):
        def decide(self, *args: Any) -> None:
            if is_decided:
                super().decide(*args)
            raise OSError("no reply")

        def holds(self, change: str) -> bool:
            if not is_reached:
                raise OSError("the node is gone")
            return super().holds(change)

    places = states(folder, 3)
    first = Late(folder / "0")
    change = [first, *places[1:]]
    heard: list[str] = []
    if not is_reached:
        with pytest.raises(UnknownOutcomeError, match="no reply; server 0, which knows whether"):
            move_resources(change, 2, 3, lambda: heard.append("it"))
    elif is_decided:
        move_resources(change, 2, 3, lambda: heard.append("it"))
    else:
        with pytest.raises(MoveError, match="no reply"):
            move_resources(change, 2, 3, lambda: heard.append("it"))
    assert heard == ["it"] * (is_decided and is_reached)
    settle(folder, 3 if is_decided else 2, 3)
    assert bool(contents(folder, 3)[2].digests) is is_decided


def test_a_size_is_noted_though_nothing_moves(folder: Path) -> None:
    for each in states(folder, 2):
        shutil.rmtree(each.path)
    with cluster(folder, 2):
        pass
    move_resources(states(folder, 3), 2, 3, size=DecidedSize("life", 4, 3))
    assert MemberState(folder / "0").decided_size("life") == DecidedSize("life", 4, 3)


def test_a_server_that_cannot_ask_server_0_waits(folder: Path) -> None:
    move_resources(states(folder, 3), 2, 3)

    def silent(_change: str) -> bool:
        raise StateError("server 0 does not answer")

    before = everything(folder, 3)
    with pytest.raises(StateError, match="server 0 does not answer"):
        MemberState(folder / "1", silent).settle(2)
    assert everything(folder, 3) == before


def test_a_server_does_not_start_in_the_middle(folder: Path) -> None:
    """Nor with the size of before: nobody has asked server 0."""
    move_resources(states(folder, 3), 2, 3)
    with (
        patch.object(MemberState, "settle"),
        pytest.raises(RuntimeError, match="the server did not start") as refused,
        cluster(folder, 2),
    ):
        pass
    assert "have come here with a change of the number of servers that has not ended" in str(refused.value.__cause__)


class Faulty(MemberState):
    """A state directory that changes a value of what it reads of gradients."""

    def read_parts(self, *args: Any) -> dict[PartKey, Slices]:
        found = super().read_parts(*args)
        for slices in found.values():
            for _, value in slices.values():
                if not isinstance(value, SparseSlices) and value.size > 1:
                    value.reshape(-1)[1] += 1
        return found


def test_a_value_that_changes_on_the_way_is_noticed(folder: Path) -> None:
    before = everything(folder, 3)
    first = MemberState(folder / "0")
    faulty = [Faulty(folder / str(index), first.holds) for index in range(3)]
    expected = (
        r"^gradient \w{16} of accumulator 'default/model\d+' is not what it was: the digest of component "
        r"'(bias|kernel)' from row \d on is \w{16}, and was \w{16} before$"
    )
    with pytest.raises(MoveError, match=expected):
        move_resources(faulty, 2, 3)
    assert everything(folder, 3) == before


def test_gradients_that_a_server_has_lost(folder: Path) -> None:
    """Those that an average is made of are missed, others are not."""
    (number,) = _numbers(folder / "1", MOVING)
    with closing(sqlite3.connect(folder / "1" / "metadata.sqlite", isolation_level=None)) as database:
        rows = database.execute(
            "SELECT id, local_step FROM part WHERE accumulator = ? ORDER BY blob", (number,)
        ).fetchall()
    database.close()
    steps = [step for _, step in rows]
    assert steps[-4:] == [1, 2, 2, 1], "the last one was late"
    change(folder / "1", "DELETE FROM part WHERE accumulator = ? AND id = ?", number, rows[-1][0])
    before = everything(folder, 3)
    incomplete = copy_state(folder, folder.with_name("incomplete"))
    change(incomplete / "1", "DELETE FROM part WHERE accumulator = ? AND id = ?", number, rows[-2][0])
    expected = (
        f"^server 1 lacks 1 of the 2 gradients of round 3 of accumulator 'default/{MOVING}', whose average is kept: "
        "end rounds until it is not, or delete the accumulator$"
    )
    with pytest.raises(MoveError, match=expected):
        move_resources(states(incomplete, 3), 2, 3)
    assert [there.digests for there, _, _ in everything(incomplete, 3)] == [there.digests for there, _, _ in before]
    move_resources(states(folder, 3), 2, 3)
    settle(folder, 3, 3)
    key = Key("default", MOVING)
    assert [len(there.sharded[key].parts) for there in contents(folder, 3)] == [len(rows) - 1] * 3


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_what_is_made_after_the_change_is_later_than_what_was_deleted_before(
    tmp_path: Path, before: int, after: int
) -> None:
    """Even if its home was another server, whose clock is ahead by an hour."""
    name = name_of("model", before, after, moves=True)
    with cluster(tmp_path, before) as client:
        client.gradient_accumulator(MODEL, name, durability="gradient")
        client.delete_accumulator(name)
    home = tmp_path / str(home_of("", name, before))
    assert change(home, f"UPDATE newest_incarnation SET number = number + {HOUR}") == 1
    numbers = [each.newest_number for each in contents(tmp_path, before)]
    move_resources(states(tmp_path, 3), before, after)
    settle(tmp_path, after, 3)
    assert [each.newest_number for each in contents(tmp_path, after)] == [max(numbers)] * after
    with cluster(tmp_path, after) as client:
        incarnation = client.gradient_accumulator(MODEL, name, durability="gradient").info().incarnation
    assert int(incarnation[-32:-16], 16) > max(numbers)


def test_what_an_interrupted_deletion_has_left_goes(folder: Path) -> None:
    home = home_of("", MOVING, 2)
    assert change(folder / str(home), "DELETE FROM accumulator WHERE name = ?", MOVING) == 1
    assert _numbers(folder / str(1 - home), MOVING)
    moves = move_resources(states(folder, 3), 2, 3)
    assert MOVING not in {each.key.name for each in moves}
    settle(folder, 3, 3)
    assert all(Key("default", MOVING) not in each.digests for each in contents(folder, 3))


def _numbers(folder: Path, name: str) -> list[int]:
    with closing(sqlite3.connect(folder / "metadata.sqlite", isolation_level=None)) as database:
        found = database.execute("SELECT id FROM accumulator WHERE name = ?", (name,)).fetchall()
    database.close()
    return [number for (number,) in found]
