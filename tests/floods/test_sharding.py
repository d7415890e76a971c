"""Sharded accumulators of many components, and rounds of many gradients: the event loop goes on meanwhile."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig
from tests.bad_input.requests import Apply, Create, Take, component, dense, identity, ref, spec, zeros
from tests.floods.servicers import PARTS, Servicers
from tests.servers.runtime import NOT_WARMED_UP

NAMES = [f"layer {index}" for index in range(PARTS)]
WHOLE = [accumulator_pb2.Piece(server=0)]


@pytest.fixture
async def member() -> AsyncIterator[Servicers]:
    """The servicers of the only server of a cluster."""
    place = ClusterConfig(cluster="train", cluster_size=1, cluster_index=0)
    async with Server(ServerConfig(runtime=NOT_WARMED_UP, cluster=place)) as server:
        yield Servicers(server)


async def staged(servicers: Servicers, names: list[str], sequences: range) -> Any:
    """Takes the average of gradients that were staged; returns it without values."""
    many = spec(*[component(name, dims=[1], pieces=WHOLE) for name in names], num_shards=1)
    made = await servicers.call("CreateAccumulator", Create(accumulator=ref("a"), spec=many))
    gradient = [dense(zeros(1), name) for name in names]
    for sequence in sequences:
        await servicers.call(
            "StageGradient",
            messages_pb2.StageGradientRequest(
                accumulator=ref("a"),
                request_id=identity(sequence),
                home_incarnation=made.info.accumulator.incarnation,
                gradient=gradient,
            ),
        )
        await servicers.call("ApplyGradient", Apply(accumulator=ref("a"), request_id=identity(sequence)))
    taken = await servicers.call("TakeGradient", Take(accumulator=ref("a"), num_required=len(sequences)))
    return taken.message.average


async def test_a_round_of_many_components(member: Servicers) -> None:
    average = await staged(member, NAMES, range(2))
    for _ in range(2):
        reduced = await member.call(
            "ReduceGradients", messages_pb2.ReduceGradientsRequest(accumulator=ref("a"), average=average)
        )
        assert [each.name for each in reduced.message.average.components] == NAMES


async def test_a_round_of_many_gradients(member: Servicers) -> None:
    average = await staged(member, ["w"], range(PARTS // 4))
    reduced = await member.call(
        "ReduceGradients", messages_pb2.ReduceGradientsRequest(accumulator=ref("a"), average=average)
    )
    assert len(reduced.message.average.components) == 1


async def test_the_end_of_an_epoch_with_many_gradients(member: Servicers) -> None:
    average = await staged(member, ["w"], range(PARTS // 4))
    ended = await member.call("EndEpoch", messages_pb2.EndEpochRequest(accumulator=ref("a")))
    assert len(ended.part_ids) == PARTS // 4
    home = average.parts.home_incarnation
    told = messages_pb2.ForgetGradientsRequest(accumulator=ref("a"), home_incarnation=home, epoch=ended.epoch)
    assert (await member.call("ForgetGradients", told)).num_forgotten == 0, "they have no epoch, and are new"
