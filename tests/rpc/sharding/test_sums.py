"""Sums of several gradients in rounds of a sharded accumulator, as aggregators pass them on."""

from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, lease_pb2, tensor_pb2
from tests.rpc.sharding.raw_shards import HOME, ROWS, RawShards, gradient, request_id, restart, running, spec
from tests.servers.raw_calls import Failure

BOTH = range(len(ROWS))
WEIGHTS = (1.0, 0.5, 3.0, 0.25)
BF16 = np.dtype(ml_dtypes.bfloat16)


def in_bf16(**fields: Any) -> dict[str, Any]:
    """Returns the fields of a spec whose sums are in another dtype than its component."""
    components = spec().components
    components[0].dtype = tensor_pb2.DATA_TYPE_BFLOAT16
    return {"components": components, **fields}


def small(seed: int) -> NDArray[Any]:
    return gradient(seed).astype(BF16)


def summed(*seeds: int) -> NDArray[np.float32]:
    """Returns the weighted sum of some gradients, as an aggregator adds them up."""
    total = np.float32(WEIGHTS[seeds[0]]) * small(seeds[0]).astype(np.float32)
    for seed in seeds[1:]:
        total += np.float32(WEIGHTS[seed]) * small(seed).astype(np.float32)
    return total


def push_sum(shards: RawShards, number: int, *seeds: int, step: int = 0, **fields: Any) -> Any:
    """Stages and applies the sum of gradients whose calls have ids of their own."""
    for server in BOTH:
        shards.raw[server].call("StageGradient", shards.staging(server, number, summed(*seeds), step, is_sum=True))
    return shards.apply(number, step, sum_of=summands(*seeds), **fields)


def summands(*seeds: int) -> list[accumulator_pb2.Summand]:
    return [
        accumulator_pb2.Summand(request_id=request_id(seed, "worker"), weight=WEIGHTS[seed], worker_id=f"w{seed}")
        for seed in seeds
    ]


def mean() -> NDArray[np.float64]:
    """The weighted mean of the gradients 0 to 3."""
    gradients = np.array([small(seed).astype(np.float64) for seed in range(4)])
    return np.average(gradients, axis=0, weights=WEIGHTS)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sum_counts_as_its_gradients(servers: RawShards, deterministic: bool) -> None:
    """It is added as it is, in the type of the sums, and the mean is rounded once."""
    try:
        servers.create(**in_bf16(deterministic=deterministic))
        assert push_sum(servers, 1, 0, 1, worker_id="w0").num_accumulated == 2
        servers.push(2, small(2), weight=WEIGHTS[2], worker_id="w2")
        servers.push(3, small(3), weight=WEIGHTS[3], worker_id="w3")
        average = servers.take(4)
        assert (average.num_gradients, average.total_weight, list(average.parts.sums)) == (4, sum(WEIGHTS), [0])
        assert list(average.worker_ids) == ["w0", "w1", "w2", "w3"]
        found = servers.reduce(average)
        assert found.dtype == BF16
        np.testing.assert_array_equal(found, mean().astype(BF16))
    finally:
        for raw in servers.raw:
            raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=servers.ref))


@pytest.mark.parametrize("server", BOTH)
def test_sums_survive_restarts(tmp_path: Path, server: int) -> None:
    with running(tmp_path) as shards:
        shards.create(**in_bf16(durability=accumulator_pb2.DURABILITY_ROUND, keep_averages=2))
        shards.push(2, small(2), weight=WEIGHTS[2])
        push_sum(shards, 1, 0, 1, 3)
        if server != HOME:
            restart(shards, server, tmp_path)
            assert shards.num_held(server) == 2
        average = shards.take(4)
        restart(shards, server, tmp_path)
        assert shards.take(4) == average, "a home that was started again names sums as before"
        np.testing.assert_array_equal(shards.reduce(average), mean().astype(BF16))


def test_calls_of_a_sum_count_once(shards: RawShards) -> None:
    """Whoever sends one of them alone gets its answer, and a sum that has one of them is refused."""
    push_sum(shards, 1, 0, 1)
    alone = messages_pb2.ApplyGradientRequest(accumulator=shards.ref, request_id=request_id(1, "worker"))
    assert shards.raw[HOME].call("ApplyGradient", alone).duplicate
    failure = shards.raw[HOME].fail("ApplyGradient", shards.applying(5, sum_of=summands(1, 2)))
    assert (failure.code, failure.field) == (grpc.StatusCode.ABORTED, "sum_of")
    np.testing.assert_allclose(shards.reduce(shards.take(2)), summed(0, 1) / 1.5, rtol=1e-6)


def _fail_to_stage(shards: RawShards, **fields: Any) -> Failure:
    return shards.raw[HOME].fail("StageGradient", shards.staging(HOME, 9, gradient(1), **fields))


def test_sums_have_the_type_of_the_sums(servers: RawShards) -> None:
    ref = accumulator_pb2.AccumulatorRef(name=servers.ref.name)
    servers.create(**in_bf16())
    try:
        staged = servers.staging(HOME, 1, small(1), is_sum=True)
        assert "float32" in servers.raw[HOME].fail("StageGradient", staged).message
        assert "bfloat16" in _fail_to_stage(servers).message
    finally:
        for raw in servers.raw:
            raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref))


def test_rows_of_sums_have_no_weights_of_their_own(servers: RawShards) -> None:
    """So sums have no sparse components, not even those with nothing sparse on this server."""
    table = accumulator_pb2.ComponentSpec(
        name="t",
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        layout=accumulator_pb2.LAYOUT_SPARSE,
        shape=accumulator_pb2.PartialShape(dims=(-1, 2)),
        pieces=[accumulator_pb2.Piece(server=1 - HOME)],
    )
    servers.create(components=[*spec().components, table])
    try:
        failure = _fail_to_stage(servers, is_sum=True)
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "is_sum")
        assert "which has sparse components, got the sum of several" in failure.message
    finally:
        for raw in servers.raw:
            raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=servers.ref))


@pytest.mark.parametrize("places", [[1], [-1], [0, 0]])
def test_forged_places_of_sums(shards: RawShards, places: list[int]) -> None:
    push_sum(shards, 1, 0, 1)
    average = shards.take(2)
    del average.parts.sums[:]
    average.parts.sums.extend(places)
    failure = shards.fail_to_reduce(HOME, average)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "average.parts.sums")


@pytest.mark.parametrize("owner", ["", "somebody"])
def test_only_aggregators_shard(servers: RawShards, owner: str) -> None:
    plain = spec(num_shards=0)
    del plain.components[0].pieces[:]
    request = messages_pb2.CreateAccumulatorRequest(
        accumulator=servers.ref, spec=plain, lifetime=lease_pb2.Lifetime(owner_client_id=owner), sharded=True
    )
    failure = servers.raw[HOME].fail("CreateAccumulator", request)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sharded")
    assert failure.message.startswith("expected sharded=False or None, got True: ")
