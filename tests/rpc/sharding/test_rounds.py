"""Rounds of a sharded accumulator: the home decides, the servers reduce exactly what it names."""

import grpc
import numpy as np
import pytest

from gradserve_server.resources.budget import Purpose
from tests.rpc.sharding.raw_shards import ROWS, RawShards, gradient, request_id

BOTH = range(len(ROWS))


def test_the_average_is_that_of_the_gradients_that_the_home_has_accepted(shards: RawShards) -> None:
    for step in range(3):
        first, second = gradient(2 * step), gradient(2 * step + 1)
        shards.push(10 * step, first, step)
        shards.push(10 * step + 1, second, step, weight=3.0)
        shards.stage(10 * step + 2, gradient(99), step)  # its sender died before it asked the home
        average = shards.take(2, 10 * step + 3)
        assert (average.step, average.num_gradients, average.total_weight) == (step + 1, 2, 4.0)
        assert not average.components
        expected = (np.float64(first) + 3 * np.float64(second)) / 4
        np.testing.assert_allclose(shards.reduce(average), expected, rtol=1e-6)


def test_gradients_are_summed_in_the_order_in_which_the_home_accepted_them(shards: RawShards) -> None:
    big, small = np.full((4, 2), 1e8, np.float32), np.full((4, 2), 3, np.float32)
    order = [small, small, big]
    for number in (2, 1, 0):
        shards.stage(number, order[number])
    for number in range(3):
        shards.apply(number)
    average = shards.take(3)
    in_order = ((np.float32(3) + np.float32(3)) + np.float32(1e8)) / np.float32(3)
    assert set(shards.reduce(average).ravel().tolist()) == {float(in_order)}


def test_a_stale_gradient_is_in_no_round_and_not_held_for_long(shards: RawShards) -> None:
    late = gradient(3)
    for step in range(3):
        shards.push(10 * step, gradient(step), step)
        if step == 1:
            assert shards.push(15, late, 0).outcome == 2, "STALE"
        average = shards.take(1, 10 * step + 1)
        np.testing.assert_array_equal(shards.reduce(average), gradient(step))
    assert [shards.num_held(server) for server in BOTH] == [0, 0]


def test_every_reader_gets_the_same_average_whatever_was_staged_meanwhile(shards: RawShards) -> None:
    shards.push(1, gradient(1))
    average = shards.take(1)
    first = shards.reduce(average)
    shards.stage(2, gradient(2))
    np.testing.assert_array_equal(shards.reduce(average), first)


def test_a_server_that_is_asked_late_reduces_the_same_round(shards: RawShards) -> None:
    shards.push(1, gradient(1))
    earlier = shards.take(1, 2)
    shards.push(3, gradient(3), 1)
    later = shards.take(1, 4 + (1 << 40))  # of another call: the first average is not acknowledged
    shards.reduce_on(0, earlier)
    start = ROWS[0]
    np.testing.assert_array_equal(shards.reduce_on(1, later), gradient(3)[start:])
    np.testing.assert_array_equal(shards.reduce_on(0, later), gradient(3)[:start])


def test_staging_again_changes_nothing(shards: RawShards) -> None:
    assert shards.stage(1, gradient(1)) == [False, False]
    assert shards.stage(1, gradient(1)) == [True, True]
    shards.apply(1)
    assert shards.apply(1).duplicate
    np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(1))
    assert shards.apply(1).duplicate


def test_memory_is_that_of_what_is_held_and_of_the_averages_that_the_home_keeps(shards: RawShards) -> None:
    sizes = [rows * 2 * 4 for rows in ROWS]
    for step in range(3):
        shards.push(10 * step, gradient(step), step)
        shards.push(10 * step + 1, gradient(step), step)
        held = [2 * size + (size if step else 0) for size in sizes]
        assert [shards.num_bytes(server) for server in BOTH] == held
        shards.reduce(shards.take(2, 10 * step + 2))
        assert [shards.num_bytes(server) for server in BOTH] == sizes, "one average"


def test_deleting_gives_all_memory_back(servers: RawShards) -> None:
    def used(server: int) -> tuple[int, int]:
        return servers.servers[server].inspect(
            lambda running: (
                running.budgets.memory.used_for[Purpose.ACCUMULATORS],
                running.registry.factory.bookkeeping.used,
            )
        )

    before = [used(server) for server in BOTH]
    servers.create()
    servers.push(1, gradient(1))
    servers.push(2, gradient(2))
    servers.reduce_on(0, servers.take(2))
    servers.delete()
    assert [used(server) for server in BOTH] == before


@pytest.mark.parametrize("server", BOTH)
def test_a_gradient_that_is_not_there_is_an_error_until_it_is_staged(shards: RawShards, server: int) -> None:
    shards.raw[1 - server].call("StageGradient", shards.staging(1 - server, 1, gradient(1)))
    shards.apply(1)
    average = shards.take(1)
    failure = shards.fail_to_reduce(server, average)
    assert (failure.code, failure.field) == (grpc.StatusCode.ABORTED, "average.parts.part_ids")
    assert "this server has 0 of the 1 gradients of round 1 of accumulator 'default/sharded'" in failure.message
    shards.stage(1, gradient(1))
    np.testing.assert_array_equal(shards.reduce(average), gradient(1))


def test_one_round_cannot_be_reduced_in_two_ways(shards: RawShards) -> None:
    shards.push(1, gradient(1))
    shards.push(2, gradient(2))
    average = shards.take(2)
    shards.reduce(average)
    average.parts.weights[0] = 2.0
    failure = shards.fail_to_reduce(0, average)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "average.parts.part_ids")
    assert "with which round 1 of accumulator 'default/sharded' was reduced here" in failure.message


def test_a_gradient_that_is_in_an_average_is_not_held_again(shards: RawShards) -> None:
    """Its message may come a second time, late."""
    shards.push(1, gradient(1))
    shards.reduce(shards.take(1))
    assert shards.stage(1, gradient(1)) == [True, True]
    assert [shards.num_held(server) for server in BOTH] == [0, 0]


def test_the_ids_of_parts_do_not_tell_the_ids_of_clients(shards: RawShards) -> None:
    shards.push(1, gradient(1))
    (part_id,) = shards.take(1).parts.part_ids
    assert len(part_id) == 16
    assert request_id(1).client_id.encode() not in part_id
