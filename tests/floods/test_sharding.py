"""Sharded accumulators of many components, and rounds of many gradients: the event loop goes on meanwhile."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, parameters_messages_pb2, parameters_pb2
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.sharding.home import part_id
from gradserve_server.app import Server
from gradserve_server.config import ListenConfig, ServerConfig
from gradserve_server.config.servers import ClusterConfig
from tests.bad_input.requests import Apply, Create, Take, component, dense, identity, ref, spec, zeros
from tests.cluster.servers import name_at
from tests.floods.servicers import PARTS, Servicers
from tests.rpc.parameters.requests import SGD
from tests.rpc.parameters.requests import spec as parameters_spec
from tests.servers.runtime import NOT_WARMED_UP

NAMES = [f"layer {index}" for index in range(PARTS)]
WHOLE = [accumulator_pb2.Piece(server=0)]
LISTEN = ListenConfig(listen=("127.0.0.1:0",), bulk_listen="off", shared_memory_socket="off")
FOLLOWED = name_at(0, 2)
INCARNATION = f"{1 << 60:016x}{0:016x}"


@pytest.fixture
async def member() -> AsyncIterator[Servicers]:
    """The servicers of the only server of a cluster."""
    place = ClusterConfig(cluster="train", cluster_size=1, cluster_index=0)
    async with Server(ServerConfig(listen=LISTEN, runtime=NOT_WARMED_UP, cluster=place)) as server:
        yield Servicers(server)


@pytest.fixture
async def follower() -> AsyncIterator[Servicers]:
    """The servicers of a server that is not the home of `FOLLOWED`."""
    place = ClusterConfig(cluster="train", cluster_size=2, cluster_index=1)
    async with Server(ServerConfig(listen=LISTEN, runtime=NOT_WARMED_UP, cluster=place)) as server:
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


def followed() -> parameters_pb2.ParametersRef:
    return parameters_pb2.ParametersRef(name=FOLLOWED, incarnation=INCARNATION)


async def followed_parameters(servicers: Servicers, names: list[str]) -> None:
    """Creates the shard of parameters with another home."""
    pieces = [accumulator_pb2.Piece(server=1)]
    await servicers.call(
        "CreateParameters",
        parameters_messages_pb2.CreateParametersRequest(
            parameters=parameters_pb2.ParametersRef(name=FOLLOWED),
            spec=parameters_spec(*[component(name, dims=[1], pieces=pieces) for name in names], num_shards=2),
            values=[dense(zeros(1), name) for name in names],
            home_incarnation=INCARNATION,
        ),
        "ParameterService",
    )


async def stage_update(servicers: Servicers, names: list[str], sequence: int, step: int) -> bytes:
    """Stages an update; returns its id."""
    update = [dense(zeros(1), name) for name in names]
    staging = parameters_messages_pb2.StageUpdateRequest(
        parameters=followed(), request_id=identity(sequence), local_step=step, update=update
    )
    await servicers.call("StageUpdate", staging, "ParameterService")
    return bytes.fromhex(part_id(RequestId(staging.request_id.client_id, sequence)))


def decided(step: int, *part_ids: bytes) -> parameters_pb2.DecidedRound:
    return parameters_pb2.DecidedRound(step=step, optimizer=SGD, part_ids=part_ids, weights=[1.0] * len(part_ids))


async def test_shards_of_parameters_with_many_components(follower: Servicers) -> None:
    await followed_parameters(follower, NAMES)
    rounds = [decided(step + 1, await stage_update(follower, NAMES, step, step)) for step in range(2)]
    reading = parameters_messages_pb2.ReadParametersRequest(parameters=followed(), decided=rounds)
    read = await follower.call("ReadParameters", reading, "ParameterService")
    assert (read.message.version.step, len(read.message.version.components)) == (2, PARTS)
    loading = parameters_messages_pb2.ChangeParametersRequest(
        parameters=followed(), request_id=identity(9), values=[dense(zeros(1), name) for name in NAMES]
    )
    await follower.call("ChangeParameters", loading, "ParameterService")


async def test_shards_of_parameters_with_many_updates(follower: Servicers) -> None:
    await followed_parameters(follower, ["w"])
    ids = [await stage_update(follower, ["w"], number, 0) for number in range(PARTS // 10)]
    reading = parameters_messages_pb2.ReadParametersRequest(parameters=followed(), decided=[decided(1, *ids)])
    assert (await follower.call("ReadParameters", reading, "ParameterService")).message.version.step == 1
    for number in range(PARTS // 10):
        await stage_update(follower, ["w"], number, 1)
    told = parameters_messages_pb2.ForgetUpdatesRequest(parameters=followed(), epoch=1)
    forgotten = await follower.call("ForgetUpdates", told, "ParameterService")
    assert forgotten.num_forgotten == PARTS // 10
