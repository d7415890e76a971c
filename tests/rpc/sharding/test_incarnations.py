"""Sharded accumulators that are deleted and made again, while requests for earlier ones are still on their way.

A server that is not the home decides by itself, from the incarnations in the requests.
"""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.parts import Parts
from tests.rpc.sharding.raw_shards import HOME, OTHER, RawShards, gradient, restart, running
from tests.servers.raw_calls import Failure

ABORTED, NOT_FOUND, INVALID = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
)
LATER = f"3{'f' * 31}"
"""No home has come as far as this."""

Later: TypeAlias = tuple[RawShards, str, messages_pb2.DeleteAccumulatorRequest]


@pytest.fixture
def later(shards: RawShards) -> Later:
    """An accumulator of which a gradient counts, the incarnation before it, and the late deletion of that."""
    earlier = shards.incarnation
    late = shards.delete_at_home()
    shards.create()
    shards.push(1, gradient(1))
    return shards, earlier, late


def test_a_late_deletion_leaves_a_later_accumulator_alone(later: Later) -> None:
    shards, _, late = later
    assert not shards.raw[OTHER].call("DeleteAccumulator", late).deleted
    np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(1))


def test_a_late_deletion_by_incarnation_leaves_a_later_accumulator_alone(later: Later) -> None:
    """The client has deleted one that another client has deleted before, and made again."""
    shards, earlier, _ = later
    request = messages_pb2.DeleteAccumulatorRequest(accumulator=shards.ref)
    request.accumulator.incarnation = earlier
    reply = shards.raw[HOME].call("DeleteAccumulator", request)
    assert (reply.deleted, bool(reply.home_incarnation)) == (False, True)
    request = messages_pb2.DeleteAccumulatorRequest(accumulator=shards.ref, home_incarnation=reply.home_incarnation)
    assert not shards.raw[OTHER].call("DeleteAccumulator", request).deleted
    np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(1))


def _stage(shards: RawShards, server: int, incarnation: str) -> Failure:
    return shards.raw[server].fail(
        "StageGradient", shards.staging(server, 9, gradient(9), home_incarnation=incarnation)
    )


def _reduce(shards: RawShards, server: int, incarnation: str) -> Failure:
    average = shards.take(1, 5)
    average.parts.home_incarnation = incarnation
    return shards.fail_to_reduce(server, average)


def _create(shards: RawShards, server: int, incarnation: str) -> Failure:
    return shards.raw[server].fail("CreateAccumulator", shards.creating(incarnation))


@pytest.mark.parametrize(
    ("server", "call", "field"),
    [
        (OTHER, _stage, "home_incarnation"),
        (HOME, _stage, "home_incarnation"),
        (OTHER, _reduce, "average.parts.home_incarnation"),
        (HOME, _reduce, "average.parts.home_incarnation"),
        (OTHER, _create, "home_incarnation"),
    ],
)
def test_what_is_for_an_earlier_accumulator_is_refused(
    later: Later, server: int, call: Callable[[RawShards, int, str], Failure], field: str
) -> None:
    """And nothing of it is held."""
    shards, earlier, _ = later
    failure = call(shards, server, earlier)
    assert (failure.code, failure.field) == (ABORTED, field), failure.message
    assert failure.message.startswith("the call is for an accumulator 'default/sharded' that was deleted")
    assert shards.num_held(server) == 1
    np.testing.assert_array_equal(shards.reduce(shards.take(1, 5)), gradient(1))


@pytest.mark.parametrize("call", [_stage, _reduce])
@pytest.mark.parametrize("server", [HOME, OTHER], ids=["home", "other"])
def test_what_is_for_a_later_accumulator_finds_none(
    later: Later, server: int, call: Callable[[RawShards, int, str], Failure]
) -> None:
    """A worker cannot end with it what a chief has made."""
    shards, _, _ = later
    assert call(shards, server, LATER).code is NOT_FOUND
    np.testing.assert_array_equal(shards.reduce(shards.take(1, 5)), gradient(1))


def test_a_later_accumulator_takes_the_place_of_an_earlier_one(shards: RawShards) -> None:
    """Whatever its deletion has not reached yet is forgotten at once, even if the later one has another spec."""
    shards.stage(1, gradient(1))
    shards.push(2, gradient(2))
    late = shards.delete_at_home()
    shards.create_at_home(keep_averages=3)
    assert shards.num_held(OTHER) == 2
    assert shards.create_part(keep_averages=3)
    assert shards.num_held(OTHER) == 0
    assert not shards.create_part(keep_averages=3)
    shards.push(1, gradient(3))
    assert not shards.raw[OTHER].call("DeleteAccumulator", late).deleted
    np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(3))


def test_a_deletion_of_what_the_home_has_lost_removes_what_others_have_left(servers: RawShards) -> None:
    """However late it comes, it leaves alone what is made after it."""
    servers.create()
    servers.stage(1, gradient(1))
    servers.delete_at_home()
    for is_left in (True, False):
        late = servers.delete_at_home()
        assert servers.raw[OTHER].call("DeleteAccumulator", late).deleted == is_left
    servers.create()
    assert not servers.raw[OTHER].call("DeleteAccumulator", late).deleted
    servers.delete()


def test_a_creation_that_is_later_than_the_deletion_makes_nothing(servers: RawShards) -> None:
    servers.create_at_home()
    creation = servers.creating()
    servers.raw[OTHER].call("DeleteAccumulator", servers.delete_at_home())
    failure = servers.raw[OTHER].fail("CreateAccumulator", creation)
    assert (failure.code, failure.field) == (ABORTED, "home_incarnation")
    servers.create()
    servers.delete()


def test_without_an_incarnation_whatever_is_there_is_deleted(servers: RawShards) -> None:
    servers.create()
    request = messages_pb2.DeleteAccumulatorRequest(accumulator=servers.ref)
    reply = servers.raw[OTHER].call("DeleteAccumulator", request)
    assert (reply.deleted, reply.home_incarnation) == (True, ""), "only the home knows what is gone"
    servers.delete()


@pytest.mark.parametrize(
    ("server", "method", "value", "text"),
    [
        (OTHER, "CreateAccumulator", "", "expected the incarnation at the home, got an empty one"),
        (OTHER, "CreateAccumulator", "x" * 32, f"expected the incarnation at the home, got '{'x' * 32}'"),
        (OTHER, "CreateAccumulator", "f" * 32, "expected the incarnation at the home, got"),
        (OTHER, "CreateAccumulator", "0" * 2000, "expected at most 1024 bytes"),
        (HOME, "CreateAccumulator", LATER, "is made here, at its home"),
        (OTHER, "DeleteAccumulator", "earlier", "expected the incarnation at the home, got 'earlier'"),
        (HOME, "DeleteAccumulator", LATER, "this is the home of accumulator 'default/sharded'"),
        (OTHER, "StageGradient", "", "expected the incarnation at the home, got an empty one"),
        (OTHER, "StageGradient", "f" * 32, "expected the incarnation at the home, got"),
    ],
)
def test_what_is_no_incarnation_of_the_home(shards: RawShards, server: int, method: str, value: str, text: str) -> None:
    requests: dict[str, Any] = {
        "CreateAccumulator": shards.creating(),
        "DeleteAccumulator": messages_pb2.DeleteAccumulatorRequest(accumulator=shards.ref),
        "StageGradient": shards.staging(server, 1, gradient(1)),
    }
    request = requests[method]
    request.home_incarnation = value
    failure = shards.raw[server].fail(method, request)
    assert (failure.code, failure.field) == (INVALID, "home_incarnation")
    assert text in failure.message


@pytest.mark.parametrize("durability", [accumulator_pb2.DURABILITY_NONE, accumulator_pb2.DURABILITY_GRADIENT])
def test_what_a_home_with_a_state_directory_makes_is_later_even_if_its_clock_was_set_back(
    tmp_path: Path, durability: accumulator_pb2.Durability
) -> None:
    """What was deleted before, or lost because it was not durable, is earlier."""
    with running(tmp_path) as shards:
        shards.create(durability=durability)
        shards.stage(1, gradient(1))
        late = shards.delete_at_home()
        restart(shards, HOME, tmp_path, Parts(wall_clock=lambda: 0))
        shards.create(durability=durability)
        assert not shards.raw[OTHER].call("DeleteAccumulator", late).deleted
        shards.push(1, gradient(2))
        np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(2))


def test_a_home_to_which_an_accumulator_has_come_counts_on_from_there(tmp_path: Path) -> None:
    """When the number of servers changed: the clock of its home before was ahead."""
    with running(tmp_path) as shards:
        shards.create(durability=accumulator_pb2.DURABILITY_GRADIENT)
        with closing(sqlite3.connect(tmp_path / str(HOME) / "metadata.sqlite", isolation_level=None)) as database:
            assert database.execute("DELETE FROM newest_incarnation").rowcount == 1
        database.close()
        restart(shards, HOME, tmp_path, Parts(wall_clock=lambda: 0))
        late = shards.delete_at_home()
        shards.create(durability=accumulator_pb2.DURABILITY_GRADIENT)
        assert not shards.raw[OTHER].call("DeleteAccumulator", late).deleted
        shards.push(1, gradient(2))
        np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(2))


def test_a_part_remembers_its_incarnation(tmp_path: Path) -> None:
    with running(tmp_path) as shards:
        shards.create(durability=accumulator_pb2.DURABILITY_GRADIENT)
        late = shards.delete_at_home()
        shards.create(durability=accumulator_pb2.DURABILITY_GRADIENT)
        restart(shards, OTHER, tmp_path)
        assert not shards.raw[OTHER].call("DeleteAccumulator", late).deleted
        shards.push(1, gradient(2))
        np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(2))
