"""Sharded parameters are divided again, and go on with the bits of parameters on one server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import optim
from gradserve_ray.states.member_state import MemberState, MoveError
from gradserve_ray.states.movable import Rows
from gradserve_ray.states.moving import move_resources
from gradserve_ray.states.redividing import Pieces
from tests.cluster.servers import name_at
from tests.cluster.sharding.clients import small_pieces
from tests.resizing.folders import cluster, contents, settle, states

RANDOM = np.random.default_rng(3)
VALUES: Mapping[str, Any] = {
    "kernel": RANDOM.standard_normal((7, 3)).astype(np.float32),
    "bias": RANDOM.standard_normal(3),
    "scale": RANDOM.standard_normal((5, 2)).astype(np.float16),
}
NAME = name_at(0, 2)


def made(client: gradserve.Client, *, sharded: bool) -> gradserve.Parameters:
    return client.parameters(
        VALUES,
        NAME,
        optimizer=optim.Adam(0.1),
        schedule=optim.cosine(20),
        update="gradient",
        num_required=2,
        sharded=sharded,
        durability="gradient",
    )


def train(parameters: gradserve.Parameters, steps: range) -> None:
    """Rounds of two workers, one of which has no update of some components."""
    for step in steps:
        random = np.random.default_rng(step)
        update = {name: random.standard_normal(value.shape).astype(value.dtype) for name, value in VALUES.items()}
        parameters.push(update, step, worker_id="a", weight=2.0)
        parameters.push({"bias": update["bias"]} if step % 2 else update, step, worker_id="b")


@pytest.fixture
def expected(tmp_path: Path) -> list[str]:
    """The digests of a run on one server, after three rounds and after six."""
    (tmp_path / "expected").mkdir()
    digests = []
    with cluster(tmp_path / "expected", 1) as client:
        parameters = made(client, sharded=False)
        for steps in (range(3), range(3, 6)):
            train(parameters, steps)
            digests.append(parameters.read().digest)
    return digests


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("is_read", [False, True], ids=["others are behind their home", "all have the newest version"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (3, 4)])
def test_they_go_on_as_on_one_server(
    tmp_path: Path, expected: list[str], before: int, after: int, is_read: bool
) -> None:
    count = max(before, after)
    with small_pieces():
        with cluster(tmp_path, before) as client:
            parameters = made(client, sharded=True)
            train(parameters, range(3))
            if is_read:
                parameters.read()
            records, weights = parameters.rounds(), parameters.info().weights
        (move,) = move_resources(states(tmp_path, count), before, after)
        assert str(move) == ("as a whole on server 0" if after == 1 else f"sharded over {after} servers")
        with cluster(tmp_path, after) as client:
            parameters = made(client, sharded=after > 1)
            assert parameters.read().digest == expected[0]
            assert parameters.info().weights == weights
            found = parameters.rounds()
            assert found[:-1] == records[:-1]
            assert found[-1].updates == records[-1].updates
            train(parameters, range(3, 6))
            assert parameters.read().digest == expected[1]
        with cluster(tmp_path, after) as client:
            assert made(client, sharded=after > 1).read().digest == expected[1]
    settle(tmp_path, after, count)
    assert all(not each.digests for each in contents(tmp_path, count)[after:])


@pytest.mark.exhaustive
def test_another_optimizer_goes_along(tmp_path: Path) -> None:
    with small_pieces():
        with cluster(tmp_path, 2) as client:
            parameters = made(client, sharded=True)
            train(parameters, range(2))
            parameters.change(optimizer=optim.SGD(0.5, momentum=0.9))
            train(parameters, range(2, 3))
            expected = parameters.read().digest
        move_resources(states(tmp_path, 3), 2, 3)
        with cluster(tmp_path, 3) as client:
            parameters = client.parameters(shared_name=NAME)
            assert parameters.read().digest == expected
            train(parameters, range(3, 4))
            assert parameters.read().step == 4


class Faulty(MemberState):
    """A state directory of which a piece is not read as it is."""

    def read_pieces(self, key: Any, wanted: Mapping[str, tuple[int, Rows]]) -> Pieces:
        pieces = dict(super().read_pieces(key, wanted))
        place = next(iter(pieces))
        first, array = pieces[place]
        pieces[place] = first, array + 1
        return pieces


def test_a_piece_that_changes_on_its_way_leaves_everything_as_it_was(tmp_path: Path, expected: list[str]) -> None:
    with small_pieces():
        with cluster(tmp_path, 2) as client:
            train(made(client, sharded=True), range(3))
        before = contents(tmp_path, 3)
        with pytest.raises(MoveError, match=r"parameters '\S+' are not what they were: the digest of component"):
            move_resources([Faulty(tmp_path / str(index)) for index in range(3)], 2, 3)
        assert [each.digests.keys() for each in contents(tmp_path, 3)] == [each.digests.keys() for each in before]
        with cluster(tmp_path, 2) as client:
            parameters = made(client, sharded=True)
            assert parameters.read().digest == expected[0]
            train(parameters, range(3, 6))
            assert parameters.read().digest == expected[1]


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    with small_pieces():
        with cluster(tmp_path, 2) as client:
            train(made(client, sharded=True), range(2))
        (tmp_path / "1").rename(tmp_path / "lost")
        with pytest.raises(MoveError, match=r"server 1 has lost its shard of parameters 'default/"):
            move_resources(states(tmp_path, 3), 2, 3)
