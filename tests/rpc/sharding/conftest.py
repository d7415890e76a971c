"""Two servers for each module."""

from collections.abc import Iterator

import pytest

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from tests.rpc.sharding.raw_shards import RawShards, running


@pytest.fixture(scope="module")
def servers() -> Iterator[RawShards]:
    with running() as shards:
        yield shards


@pytest.fixture
def shards(servers: RawShards) -> Iterator[RawShards]:
    """A new accumulator on both servers."""
    servers.create()
    yield servers
    for raw in servers.raw:
        raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=servers.ref))
