"""What servers of a sharded accumulator forget, and what they keep: whatever they hear, in whatever order."""

from pathlib import Path
from typing import Any

import grpc
import numpy as np

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from tests.rpc.sharding.raw_shards import HOME, OTHER, ROWS, RawShards, gradient, request_id, restart, running

BOTH = range(len(ROWS))
FAR = 1 << 40
"""A step that no round reaches."""


def test_old_decisions_take_nothing_from_rounds_after_the_step_was_set_back(servers: RawShards) -> None:
    servers.create(keep_averages=2)
    set_step(servers, 10)
    old = []
    for number, step in ((1, 10), (2, 11), (3, 12)):
        servers.push(number, gradient(number), step)
        old.append(servers.take(1, 1000 + number))
    servers.reduce(old[0])
    set_step(servers, 0)
    servers.push(9, gradient(9), 0)
    for average in old[1:]:
        servers.reduce(average)
    np.testing.assert_array_equal(servers.reduce(servers.take(1, 2000)), gradient(9))
    servers.delete()


def test_a_server_that_was_started_again_learns_of_a_setback_with_the_gradients(tmp_path: Path) -> None:
    with running(tmp_path) as shards:
        shards.create()
        set_step(shards, 10)
        shards.push(1, gradient(1), 10)
        old = shards.take(1, 1001)
        set_step(shards, 0)
        shards.push(9, gradient(9), 0)
        restart(shards, OTHER, tmp_path)
        np.testing.assert_array_equal(shards.reduce(old), gradient(1))
        np.testing.assert_array_equal(shards.reduce(shards.take(1, 2000)), gradient(9))


def test_an_average_that_the_home_keeps_can_be_read_if_steps_are_reached_twice(servers: RawShards) -> None:
    servers.create(keep_averages=2)
    for number, step in ((1, 0), (2, 1)):
        servers.push(number, gradient(number), step)
        servers.reduce(servers.take(1, 1000 + number))
    set_step(servers, 1)
    servers.push(3, gradient(3), 1)
    servers.reduce(servers.take(1, 1003))
    np.testing.assert_array_equal(servers.reduce(read(servers, 1, step=1)), gradient(1))
    servers.delete()


def test_an_average_is_kept_for_its_reader_until_the_next_call(shards: RawShards) -> None:
    shards.push(1, gradient(1), 0)
    shards.take(1, 1001)
    slow = read(shards, 5000)
    for number, step in ((2, 1), (3, 2), (4, 3)):
        shards.push(number, gradient(number), step)
        shards.reduce(shards.take(1, 1000 + number))
    np.testing.assert_array_equal(shards.reduce(slow), gradient(1))
    newest = read(shards, 5001)
    np.testing.assert_array_equal(shards.reduce(newest), gradient(4))
    assert [shards.num_bytes(server) for server in BOTH] == [rows * 2 * 4 for rows in ROWS], "one average"


def test_a_gradient_of_an_earlier_epoch_counts_once_it_was_staged_again(shards: RawShards) -> None:
    shards.stage(1, gradient(1))
    set_step(shards, 0)
    failure = shards.raw[HOME].fail("ApplyGradient", shards.applying(1))
    assert (failure.code, failure.field) == (grpc.StatusCode.ABORTED, "epoch")
    assert shards.stage(1, gradient(1)) == [True, True]
    shards.apply(1)
    np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(1))


def test_a_late_gradient_of_an_earlier_epoch_is_stale_first_of_all(shards: RawShards) -> None:
    shards.stage(1, gradient(1))
    set_step(shards, 5)
    assert shards.apply(1).outcome == 2, "STALE"


def test_the_epoch_survives_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as shards:
        shards.create()
        set_step(shards, 7)
        shards.stage(1, gradient(1), 7)
        shards.stage(2, gradient(2), 7)
        set_step(shards, 0)
        shards.stage(1, gradient(1), 7)
        for server in BOTH:
            restart(shards, server, tmp_path)
        assert [forget(shards, server).num_forgotten for server in BOTH] == [1, 1]
        shards.apply(1, 7)
        np.testing.assert_array_equal(shards.reduce(shards.take(1)), gradient(1))


def forget(shards: RawShards, server: int) -> messages_pb2.ForgetGradientsResponse:
    """Has a server forget what was staged before the current epoch and does not count."""
    asked = messages_pb2.GetNumAccumulatedRequest(accumulator=shards.ref)
    epoch = shards.raw[HOME].call("GetNumAccumulated", asked).epoch
    told = messages_pb2.EndEpochResponse(epoch=epoch)
    return told_to(shards, server, told)


def test_a_client_withdraws_what_does_not_count(shards: RawShards) -> None:
    shards.stage(1, gradient(1))
    shards.stage(2, gradient(2))
    for server in BOTH:
        shards.raw[server].call("StageGradient", shards.staging(server, 3, gradient(3), withdrawn=[1]))
    assert [shards.num_held(server) for server in BOTH] == [2, 2]
    other = shards.staging(HOME, 4, gradient(4), withdrawn=[2], request_id=request_id(4, "somebody else"))
    shards.raw[HOME].call("StageGradient", other)
    assert shards.num_held(HOME) == 3, "the gradient 2 is not theirs"


def test_what_does_not_count_when_an_epoch_ends_is_forgotten(shards: RawShards) -> None:
    for number in (1, 2):
        shards.push(number, gradient(number))
    kept = shards.take(2)
    shards.push(3, gradient(3), 1)
    for number in (4, 5, 6):
        shards.stage(number, gradient(number), FAR)
    ended = shards.raw[HOME].call("EndEpoch", messages_pb2.EndEpochRequest(accumulator=shards.ref))
    assert len(ended.part_ids) == 3
    assert [told_to(shards, server, ended).num_forgotten for server in BOTH] == [3, 3]
    shards.stage(6, gradient(6), FAR)
    assert [told_to(shards, server, ended).num_forgotten for server in BOTH] == [0, 0], "it belongs to the new epoch"
    shards.apply(6, FAR)
    np.testing.assert_array_equal(shards.reduce(kept), (gradient(1) + gradient(2)) / np.float32(2))
    np.testing.assert_array_equal(shards.reduce(shards.take(2, 2000)), (gradient(3) + gradient(6)) / np.float32(2))


def told_to(
    shards: RawShards, server: int, ended: messages_pb2.EndEpochResponse
) -> messages_pb2.ForgetGradientsResponse:
    """Tells a server what the home has answered."""
    request = messages_pb2.ForgetGradientsRequest(
        accumulator=shards.ref, home_incarnation=shards.incarnation, epoch=ended.epoch, part_ids=ended.part_ids
    )
    response: messages_pb2.ForgetGradientsResponse = shards.raw[server].call("ForgetGradients", request)
    return response


def test_without_an_epoch_a_call_may_come_within_the_lease_of_clients(shards: RawShards) -> None:
    for server in BOTH:
        staging = shards.staging(server, 1, gradient(1), FAR)
        staging.ClearField("epoch")
        shards.raw[server].call("StageGradient", staging)
    ended = shards.raw[HOME].call("EndEpoch", messages_pb2.EndEpochRequest(accumulator=shards.ref))
    assert [told_to(shards, server, ended).num_forgotten for server in BOTH] == [0, 0]
    for server in BOTH:
        let_time_pass(shards, server)
        assert told_to(shards, server, ended).num_forgotten == 1


def test_a_server_asks_about_old_gradients_once_in_a_while(shards: RawShards) -> None:
    shards.stage(1, gradient(1), FAR)
    let_time_pass(shards, OTHER)
    answers = [
        shards.raw[OTHER].call("StageGradient", shards.staging(OTHER, number, gradient(number))).has_old_gradients
        for number in (2, 3)
    ]
    assert answers == [True, False]


def let_time_pass(shards: RawShards, server: int) -> None:
    """Makes what a server holds as old as the lease of clients."""

    def later(serving: Any) -> None:
        ((_, accumulator),) = serving.registry.page("default", "", 1)
        shard, clock = accumulator.shard, accumulator.shard._clock
        shard._clock = lambda: clock() + shard._call_seconds

    shards.servers[server].inspect(later)


def set_step(shards: RawShards, step: int) -> None:
    shards.raw[HOME].call("SetGlobalStep", messages_pb2.SetGlobalStepRequest(accumulator=shards.ref, global_step=step))


def read(shards: RawShards, number: int, **fields: Any) -> accumulator_pb2.Average:
    request = messages_pb2.ReadAverageRequest(accumulator=shards.ref, request_id=request_id(number, "reader"), **fields)
    average: accumulator_pb2.Average = shards.raw[HOME].call("ReadAverage", request).average
    return average
