"""What clients of sharded accumulators can get wrong: each error says what differs."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from tests.rpc.sharding.raw_shards import HOME, OTHER, RawShards, gradient, spec

INVALID, EXISTS, ABORTED, NOT_FOUND = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
)


def _another_plan(wanted: Any) -> None:
    for piece, rows in zip(wanted.components[0].pieces, (2, 2), strict=True):
        piece.num_rows = rows


def _another_order(wanted: Any) -> None:
    first, second = wanted.components[0].pieces
    first.server, second.server = second.server, first.server


def _another_list(wanted: Any) -> None:
    wanted.num_shards = 3


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (_another_plan, EXISTS, "exists with another spec: "),
        (_another_order, EXISTS, "exists with another spec: "),
        (_another_list, EXISTS, "exists with another spec: num_shards"),
    ],
)
@pytest.mark.parametrize("server", [HOME, OTHER], ids=["home", "other"])
def test_another_plan(
    shards: RawShards, server: int, change: Callable[[Any], None], code: grpc.StatusCode, text: str
) -> None:
    wanted = spec()
    change(wanted)
    request = messages_pb2.CreateAccumulatorRequest(accumulator=shards.ref, spec=wanted)
    if server == OTHER:
        request.home_incarnation = shards.incarnation
    failure = shards.raw[server].fail("CreateAccumulator", request)
    assert (failure.code, text in failure.message) == (code, True), failure.message


def _forged_id(average: Any) -> None:
    average.parts.part_ids[0] = bytes(16)


def _short_id(average: Any) -> None:
    average.parts.part_ids[0] = b"short"


def _twice(average: Any) -> None:
    average.parts.part_ids.append(average.parts.part_ids[0])
    average.parts.weights.append(1.0)


def _without_weight(average: Any) -> None:
    del average.parts.weights[:]


def _without_parts(average: Any) -> None:
    average.ClearField("parts")


def _old_incarnation(average: Any) -> None:
    average.parts.home_incarnation = f"{'0' * 39}1"


def _no_incarnation(average: Any) -> None:
    average.parts.home_incarnation = "another"


def _later_incarnation(average: Any) -> None:
    average.parts.home_incarnation = f"3{'f' * 31}"


@pytest.mark.parametrize(
    ("forge", "code", "field", "text"),
    [
        (_forged_id, ABORTED, "average.parts.part_ids", "this server has 0 of the 1 gradients of round 1"),
        (_short_id, INVALID, "average.parts.part_ids", "expected ids of 16 bytes, got one of 5"),
        (_twice, INVALID, "average.parts.part_ids", "got 2 ids, 1 different ones, and 2 weights"),
        (_without_weight, INVALID, "average.parts.part_ids", "got 1 ids, 1 different ones, and 0 weights"),
        (_without_parts, INVALID, "average.parts", "expected what the home has answered, got no parts"),
        (_old_incarnation, ABORTED, "average.parts.home_incarnation", "that was deleted, as this server knows a later"),
        (_no_incarnation, INVALID, "average.parts.home_incarnation", "at the home, got 'another'"),
        (_later_incarnation, NOT_FOUND, "average.parts.home_incarnation", "has only an earlier accumulator"),
    ],
)
def test_forged_parts(
    shards: RawShards, forge: Callable[[Any], None], code: grpc.StatusCode, field: str, text: str
) -> None:
    """They change nothing: the round can be reduced as the home has decided it."""
    shards.push(1, gradient(1))
    average = shards.take(1)
    forged = accumulator_pb2.Average()
    forged.CopyFrom(average)
    forge(forged)
    for server in (HOME, OTHER):
        failure = shards.fail_to_reduce(server, forged)
        assert (failure.code, failure.field) == (code, field)
        assert text in failure.message
    assert shards.reduce(average).tobytes() == gradient(1).tobytes()


@pytest.mark.parametrize("method", ["ApplyGradient", "PushPull"])
def test_an_old_incarnation_of_the_home(shards: RawShards, method: str) -> None:
    ref = accumulator_pb2.AccumulatorRef(name=shards.ref.name, incarnation="0" * 32)
    request: Any = shards.applying(1)
    if method == "PushPull":
        request = messages_pb2.PushPullRequest(request_id=request.request_id, num_required=1)
    request.accumulator.CopyFrom(ref)
    failure = shards.raw[HOME].fail(method, request)
    assert (failure.code, failure.field) == (grpc.StatusCode.NOT_FOUND, "accumulator.incarnation")
    assert failure.message == "accumulator 'default/sharded' was deleted; another one has this name now"


def test_a_member_of_another_cluster(shards: RawShards) -> None:
    request = shards.staging(OTHER, 1, gradient(1))
    request.accumulator.member = f"eval {OTHER}/2"
    failure = shards.raw[OTHER].fail("StageGradient", request)
    assert failure.code is INVALID
    assert failure.message == (
        f"this server is server {OTHER} of 2 in cluster 'train', and the call is for 'eval {OTHER}/2'"
    )
