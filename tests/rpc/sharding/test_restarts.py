"""Servers of a sharded accumulator that are started again, with and without a state directory."""

from pathlib import Path

import numpy as np
import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from tests.rpc.sharding.raw_shards import OTHER, ROWS, gradient, restart, running

BOTH = range(len(ROWS))
LEVELS = [accumulator_pb2.DURABILITY_ROUND, accumulator_pb2.DURABILITY_GRADIENT]


@pytest.mark.parametrize("durability", LEVELS)
@pytest.mark.parametrize("server", BOTH)
def test_nothing_acknowledged_is_lost(tmp_path: Path, server: int, durability: accumulator_pb2.Durability) -> None:
    """At any stage of a round: staged, accepted, decided, reduced by one server, reduced by both."""
    with running(tmp_path) as shards:
        shards.create(durability=durability)
        shards.push(1, gradient(1))
        shards.stage(2, gradient(2))
        restart(shards, server, tmp_path)
        assert shards.num_held(server) == 2
        shards.apply(2)
        restart(shards, server, tmp_path)
        assert shards.apply(2).duplicate
        average = shards.take(2)
        restart(shards, server, tmp_path)
        assert shards.take(2) == average, "a home that was started again does not decide in another way"
        first = shards.reduce(average)
        restart(shards, server, tmp_path)
        np.testing.assert_array_equal(shards.reduce(average), first)
        np.testing.assert_array_equal(first, (gradient(1) + gradient(2)) / np.float32(2))
        shards.push(3, gradient(3), 1)
        np.testing.assert_array_equal(shards.reduce(shards.take(1, 2000)), gradient(3))


def test_what_no_round_needs_is_removed_from_the_disk(tmp_path: Path) -> None:
    with running(tmp_path) as shards:
        shards.create(durability=LEVELS[0])
        for step in range(4):
            shards.push(10 * step, gradient(step), step)
            shards.stage(10 * step + 1, gradient(99), step)
            shards.reduce(shards.take(1, 10 * step + 2))
        for server in BOTH:
            restart(shards, server, tmp_path)
            assert shards.num_held(server) == 2, "of the round that the home keeps: one that counted, one that did not"
        shards.delete()
        for server in BOTH:
            restart(shards, server, tmp_path)
            assert shards.blobs(server) == []


def test_the_level_of_rounds_is_that_of_gradients(tmp_path: Path) -> None:
    """What servers hold for a gradient that the home has counted must not be lost."""
    with running(tmp_path) as shards:
        for durability in (*LEVELS, accumulator_pb2.DURABILITY_UNSPECIFIED):
            shards.create(durability=durability)
        request = messages_pb2.GetAccumulatorRequest(accumulator=shards.ref)
        for raw in shards.raw:
            info = raw.call("GetAccumulator", request).info
            assert info.spec.durability == accumulator_pb2.DURABILITY_GRADIENT


def test_an_orphaned_gradient_does_not_outlive_its_rounds(tmp_path: Path) -> None:
    with running(tmp_path) as shards:
        shards.create(durability=LEVELS[0])
        shards.stage(1, gradient(1))
        restart(shards, OTHER, tmp_path)
        for step in range(3):
            shards.push(10 + step, gradient(step), step)
            shards.reduce(shards.take(1, 20 + step))
        assert [shards.num_held(server) for server in BOTH] == [0, 0]
        restart(shards, OTHER, tmp_path)
        assert shards.num_held(OTHER) == 1, "of the last round"


def test_a_gradient_that_comes_again_after_a_restart_is_forgotten_once(tmp_path: Path) -> None:
    with running(tmp_path) as shards:
        shards.create(durability=LEVELS[0])
        shards.push(1, gradient(1))
        average = shards.take(1, 2)
        shards.reduce(average)
        restart(shards, OTHER, tmp_path)
        shards.reduce(average)
        shards.stage(1, gradient(1))
        for step in (1, 2, 3):
            shards.push(10 + step, gradient(step), step)
            np.testing.assert_array_equal(shards.reduce(shards.take(1, 20 + step)), gradient(step))
        assert [shards.num_held(server) for server in BOTH] == [0, 0]
